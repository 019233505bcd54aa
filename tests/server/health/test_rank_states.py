"""Which ranks take part, as /statusz shows it, and when the supervisor gives one up."""

import threading
from dataclasses import replace

import httpx
import pytest

from quire_server.core.rank_step import NO_WORK, Work
from quire_server.core.topology import MAX_RANKS, Topology
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.health.decision import Thresholds, judge
from quire_server.health.heartbeat import Control, Phase, Process, RankEcho, SharedState
from quire_server.health.rank_states import Group, RankState, rank_states
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


#: Two stages of two ranks, the second one on another node.
GROUP = Group(
    Topology(2, 0, 2),
    {0: "m-0", 1: "m-0", 2: "m-0-1", 3: "m-0-1"},
    {
        0: RankEcho(8, NOW - 0.3, 0.004, 1.5, 100),
        1: RankEcho(8, NOW - 0.3, 0.005, 1.6, 100),
        2: RankEcho(8, NOW - 0.3, 0.006, 1.7, 100),
        3: RankEcho(7, NOW - 0.7, 0.050, 9.0, 100),
    },
    sent_at=NOW - 0.5,
)
BEATS, STEPS = {Process.ENGINE: NOW - 0.1, 1: NOW - 0.1}, {0: 8, 1: 8}


def test_the_leader_shows_the_ranks_of_all_nodes_with_their_place_and_what_they_did():
    states = rank_states(BEATS, STEPS, NOW, range(2), group=GROUP)
    assert [(one.rank, one.stage, one.tensor_rank, one.host) for one in states] == [
        (0, 0, 0, "m-0"),
        (1, 0, 1, "m-0"),
        (2, 1, 0, "m-0-1"),
        (3, 1, 1, "m-0-1"),
    ]
    assert [one.last_step for one in states] == [8, 8, 8, 7]
    assert [one.step_seconds for one in states] == [0.004, 0.005, 0.006, 0.050]
    assert [one.missing for one in states] == [""] * 4
    documents = [one.document() for one in states]
    assert [one["beatAge"] for one in documents] == [0.1, 0.1, None, None], "those of another node are unseen"
    assert [one["echoAge"] for one in documents] == [0.3, 0.3, 0.3, 0.7]
    assert [one["overdueSeconds"] for one in documents] == [0.0, 0.0, 0.0, 0.5], "since the step was sent"
    assert [round(one.silence, 3) for one in states] == [0.1, 0.1, 0.0, 0.5]


def test_no_echo_of_an_idle_group_is_overdue_however_old_the_last_one_is():
    idle = {rank: echo._replace(number=8) for rank, echo in GROUP.echoes.items()}
    states = rank_states(BEATS, STEPS, NOW + 60, range(2), group=replace(GROUP, echoes=idle))
    assert [one.overdue for one in states] == [0.0] * 4


def test_before_its_first_echo_a_rank_is_overdue_since_the_first_step():
    states = rank_states(BEATS, {0: 1}, NOW, range(2), group=replace(GROUP, echoes={}))
    assert [one.overdue for one in states] == [0.5] * 4
    assert [
        one.overdue for one in rank_states(BEATS, {}, NOW, range(2), group=replace(GROUP, sent_at=0))
    ] == [0.0] * 4


def test_a_rank_of_another_node_is_missing_until_it_has_loaded_and_once_it_is_lost():
    joining = replace(GROUP, hosts={0: "m-0", 1: "m-0", 2: "m-0-1"}, echoes={})
    loading = rank_states(BEATS, {}, NOW, range(2), group=joining)
    assert [state.missing for state in loading] == ["", "", "", "NotLoaded"]
    lost = rank_states(BEATS, STEPS, NOW, range(2), lost_rank=3, group=GROUP)
    assert [state.missing for state in lost] == ["", "", "", "NotEchoed"]


def test_a_node_without_rank_0_shows_its_own_ranks_alone():
    beats, own = {2: NOW - 0.1, 3: NOW - 9}, Group(GROUP.topology, {2: "m-0-1", 3: "m-0-1"})
    states = rank_states(beats, {2: 8, 3: 7}, NOW, range(2, 4), group=own)
    assert [(one.rank, one.stage, one.last_step, one.missing) for one in states] == [
        (2, 1, 8, ""),
        (3, 1, 7, "Silent"),
    ]


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


def test_what_a_rank_did_in_all_its_steps_is_added_up_and_a_step_without_work_is_no_step_time(tmp_path):
    state = SharedState.create(tmp_path)
    assert (state.read_echoes(), state.read_sent_at()) == ({}, 0.0)
    writer = HeartbeatWriter(state, NOW)
    for number, work in enumerate([Work(2000, 64), Work(3000, 32), NO_WORK], 1):
        writer.rank_stepped(number)
        writer.rank_echoed(MAX_RANKS - 1, number, work)
    echo = SharedState.open(tmp_path).read_echoes()[MAX_RANKS - 1]
    assert (echo.number, echo.exchanged_bytes) == (3, 96)
    assert (echo.step_seconds, echo.busy_seconds) == (0.003, pytest.approx(0.005))
    assert 0 < state.read_sent_at() <= echo.at
