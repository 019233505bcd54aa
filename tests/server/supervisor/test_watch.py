"""When loading fails, and what the end of a child means, as tables."""

import signal

import pytest

from quire_server.health.heartbeat import Heartbeat, Phase
from quire_server.health.rank_states import RankState
from quire_server.supervisor.processes import threads_of_rank
from quire_server.supervisor.watch import Ending, LoadLimits, ending_of_child, watch_load
from quire_server.termination import Failure, Reason

LIMITS = LoadLimits(startup=1000.0, stall=10.0)
LOADING = Heartbeat(
    written_at=0.0,
    phase=Phase.LOADING,
    work_pending=True,
    queued=0,
    running=0,
    steps=0,
    loaded_bytes=5,
    total_bytes=9,
    started_at=0.0,
    load_seconds=0.0,
    progress_at=50.0,
    proof_at=0.0,
    kv_utilization=0.0,
    reason="",
)
WARMING = LOADING._replace(phase=Phase.WARMING)
SERVING = LOADING._replace(phase=Phase.SERVING)


@pytest.mark.parametrize(
    ("sample", "now", "reason"),
    [
        (None, 119.0, None),  # the engine imports its libraries
        (None, 120.0, Reason.LOAD_STALLED),
        (LOADING, 59.9, None),
        (LOADING, 60.0, Reason.LOAD_STALLED),
        (WARMING, 60.0, Reason.LOAD_STALLED),
        (LOADING._replace(progress_at=999.0), 1000.0, Reason.STARTUP_TIMEOUT),
        (SERVING, 5000.0, None),
    ],
)
def test_loading_fails_when_it_stalls_or_takes_too_long(sample, now, reason):
    failure = watch_load(sample, 0.0, now, LIMITS)
    assert (failure and failure.reason) == reason


def test_the_remedy_is_a_field_of_the_api():
    stalled = watch_load(LOADING, 0.0, 60.0, LIMITS)
    late = watch_load(LOADING, 0.0, 1000.0, LIMITS)
    assert "loadStallTimeoutSeconds" in stalled.message
    assert "startupTimeoutSeconds" in late.message
    assert "5 of 9 bytes" in stalled.message


def test_a_rank_that_did_not_run_while_the_model_loaded_is_named():
    """All others wait for it, and nothing else shows which one it is."""
    states = (
        RankState(0, 0.1, 0),
        RankState(1, 58.0, 0, "Silent"),
        RankState(2, None, 0, "NotStarted"),
    )
    for now in (60.0, 1000.0):
        message = watch_load(LOADING, 0.0, now, LIMITS, states).message
        assert "rank 1 did not run for 58 s, rank 2 has not started" in message
        assert "rank 0" not in message
        assert "the node's CPU and memory" in message
        assert "rank" not in watch_load(LOADING, 0.0, now, LIMITS, states[:1]).message


CORRUPT = Failure(Reason.MODEL_CORRUPT, "the file is damaged")


@pytest.mark.parametrize(
    ("wait_status", "left_behind", "exit_code", "reason"),
    [
        (signal.SIGKILL, None, 137, None),
        (signal.SIGKILL, CORRUPT, 137, None),
        (65 << 8, CORRUPT, 65, Reason.MODEL_CORRUPT),
        (signal.SIGSEGV, None, 70, Reason.ENGINE_CRASHED),
        (1 << 8, None, 70, Reason.ENGINE_CRASHED),
        (0, None, 70, Reason.ENGINE_CRASHED),
    ],
)
def test_a_dead_child_ends_the_server_with_a_reason(wait_status, left_behind, exit_code, reason):
    ending = ending_of_child("engine", wait_status, left_behind)
    assert ending.exit_code == exit_code
    assert (ending.failure and ending.failure.reason) == reason


def test_the_signal_that_ended_a_child_is_named():
    assert ending_of_child("health", signal.SIGKILL, None).killed == "health"
    assert "SIGSEGV" in ending_of_child("engine", signal.SIGSEGV, None).failure.message
    assert Ending.of(CORRUPT) == Ending(65, CORRUPT)


@pytest.mark.parametrize(
    ("ranks", "variable", "threads"), [(2, "8", 4), (4, "6", 1), (3, "2", 1), (64, "", 1)]
)
def test_ranks_share_the_threads(ranks, variable, threads):
    assert threads_of_rank(ranks, {"OMP_NUM_THREADS": variable}) == threads
