"""Which ranks take part, as /statusz shows it, and when the supervisor gives one up."""

import threading

import httpx
import pytest

from quire_server.health.decision import Thresholds, judge
from quire_server.health.heartbeat import Control, Phase, Process, SharedState
from quire_server.health.rank_states import RankState, rank_states
from quire_server.health.server import HealthServer
from quire_server.supervisor.watch import watch_ranks
from quire_server.termination import Reason
from tests.server.health.test_decision import IDLE

NOW = 1000.0


@pytest.mark.parametrize(
    ("beats", "lost_rank", "missing"),
    [
        ({Process.ENGINE: NOW - 0.4, 1: NOW - 0.4}, 0, ["", ""]),
        ({Process.ENGINE: NOW - 0.4}, 0, ["", "NotStarted"]),
        ({Process.ENGINE: NOW - 0.4, 1: NOW - 2.5}, 0, ["", "Silent"]),
        ({Process.ENGINE: NOW - 9, 1: NOW - 0.4}, 0, ["Silent", ""]),
        ({Process.ENGINE: NOW - 0.4, 1: NOW - 0.4}, 1, ["", "NotEchoed"]),
        ({Process.ENGINE: NOW - 0.4, 1: NOW - 9.0}, 1, ["", "NotEchoed"]),
    ],
)
def test_a_rank_is_missing_when_it_does_not_run_or_does_not_echo(beats, lost_rank, missing):
    states = rank_states(beats, {0: 8, 1: 7}, NOW, range(2), lost_rank=lost_rank)
    assert [state.missing for state in states] == missing
    assert [state.last_step for state in states] == [8, 7]


def test_one_process_that_has_the_whole_model_has_no_ranks():
    assert rank_states({Process.ENGINE: NOW}, {}, NOW, range(1)) == ()


def test_a_rank_of_another_node_is_named_once_it_is_lost():
    beats, steps = {Process.ENGINE: NOW, 1: NOW}, {0: 8, 1: 8}
    assert [state.rank for state in rank_states(beats, steps, NOW, range(2), lost_rank=3)] == [0, 1, 3]
    first, lost = rank_states({Process.ENGINE: NOW}, {0: 8}, NOW, range(1), lost_rank=1)
    assert (first.missing, lost.rank, lost.missing) == ("", 1, "NotEchoed")


@pytest.mark.parametrize(
    ("killed", "missing"),
    [("rank 1", ["", "Killed"]), ("engine", ["Killed", ""]), ("api", ["", ""]), ("rank 12", ["", ""])],
)
def test_a_rank_that_was_killed_is_missing_at_once(killed, missing):
    states = rank_states({Process.ENGINE: NOW, 1: NOW}, {}, NOW, range(2), killed=killed)
    assert [state.missing for state in states] == missing
    verdict = judge(IDLE, Control(failed="Killed", killed=killed), {}, NOW, Thresholds(60.0, 60.0))
    assert killed in verdict.silent


SILENT = (RankState(0, 0.1, 8), RankState(1, 2.6, 7, "Silent"))


def test_a_silent_rank_ends_a_server_that_serves_and_is_named_with_its_last_step():
    failure = watch_ranks(IDLE, SILENT, 60.0)
    assert failure.reason is Reason.PROCESS_STALLED
    assert "rank 1 (last step 7)" in failure.message
    assert watch_ranks(IDLE, (SILENT[0], RankState(1, 0.1, 7, "NotEchoed")), 60.0) is None, "rank 0 says it"


def test_while_the_model_loads_or_all_were_paused_no_rank_is_lost():
    assert watch_ranks(None, SILENT, 60.0) is None
    assert watch_ranks(IDLE._replace(phase=Phase.LOADING), SILENT, 60.0) is None
    assert watch_ranks(IDLE, SILENT, 2.4) is None, "the supervisor itself was paused until then"


def test_a_busy_node_ends_no_server_that_warms_up_and_a_stopped_rank_does():
    warming = IDLE._replace(phase=Phase.WARMING)
    assert watch_ranks(warming, (SILENT[0], RankState(1, 9.9, 0, "Silent")), 60.0) is None
    failure = watch_ranks(warming, (SILENT[0], RankState(1, 10.0, 0, "Silent")), 60.0)
    assert failure is not None and "did not run for 10 s: rank 1" in failure.message


def test_statusz_shows_age_and_step_of_each_rank(tmp_path):
    state = SharedState.create(tmp_path)
    state.beat(Process.ENGINE)
    state.beat(1)
    state.write_step(0, 12)
    state.write_step(1, 11)
    server = HealthServer(("127.0.0.1", 0), state, Thresholds(60.0, 60.0, ranks=range(3)), "1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/statusz"
        first, second, third = httpx.get(url).json()["ranks"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (first["lastStep"], second["lastStep"], third["lastStep"]) == (12, 11, 0)
    assert (first["missing"], second["missing"], third["missing"]) == ("", "", "NotStarted")
    assert 0 <= second["beatAge"] < 60
    assert third["beatAge"] is None
