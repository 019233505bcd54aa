"""The engine's loop on a real socket, with a scheduler and no tensors."""

import os
import pickle
import socket

import pytest

from quire_server.core.engine_stats import EngineStats
from quire_server.core.request import FinishReason, Request, SamplingParams
from quire_server.core.step import StepEvents
from quire_server.engine.inbox import SOCKET_NAME
from quire_server.engine.messages import EngineInfo, FrameReader, Inbox, Outbox, to_frame
from quire_server.faults import Fault, Faults
from quire_server.health.heartbeat import Phase


class Peer:
    """A client that speaks frames and nothing more."""

    def __init__(self, rig):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(5)
        self.connection.connect(str(rig.run_dir / SOCKET_NAME))
        self.reader = FrameReader()
        self.inbox = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.connection.close()

    def send(self, *requests, aborts=()):
        self.connection.sendall(to_frame(Inbox(requests, aborts)))

    def messages(self):
        while True:
            while self.inbox:
                yield self.inbox.pop(0)
            data = self.connection.recv(65536)
            if not data:
                return
            self.inbox += self.reader.feed(data)

    def events(self):
        for message in self.messages():
            if isinstance(message, Outbox):
                yield from StepEvents(message.request_ids, message.token_ids, message.events)

    def answer(self, request_id):
        tokens = []
        for event in self.events():
            if event.request_id == request_id:
                tokens += event.token_ids
                if event.finish_reason is not None:
                    return tokens, event
        raise AssertionError("the connection ended")


def ask(name, prompt=(5,), max_tokens=3, **more):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, tuple(prompt), sampling, **{"arrival": 0.0, **more})


def test_a_request_is_answered_and_the_engine_says_who_it_is(rig):
    with Peer(rig) as peer:
        assert next(peer.messages()) == EngineInfo(64, 100, 32, 8, 4)
        peer.send(ask("a"))
        assert peer.answer("a")[0] == [6, 7, 8]


def test_two_peers_hear_of_their_own_requests_only(rig):
    with Peer(rig) as one, Peer(rig) as two:
        one.send(ask("a", (10,), 20))
        two.send(ask("b", (50,), 20))
        assert one.answer("a")[0] == list(range(11, 31))
        assert two.answer("b")[0] == list(range(51, 71))


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff" + os.urandom(4095),  # no length that a frame may have
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps({"a": 1}),
        b"\x00\x00\x00\x01\xc1",
        to_frame(Outbox((), EngineStats())),
    ],
    ids=["random", "http", "pickle", "bad msgpack", "a message of the engine"],
)
def test_a_peer_that_talks_nonsense_is_dropped_and_the_engine_lives(rig, noise):
    with Peer(rig) as stranger, Peer(rig) as peer:
        stranger.connection.sendall(noise)
        assert list(stranger.events()) == [], "the stranger's connection was not closed"
        peer.send(ask("a"))
        assert peer.answer("a")[0] == [6, 7, 8]


def test_a_peer_that_does_not_read_is_dropped(rig, monkeypatch):
    monkeypatch.setattr("quire_server.engine.inbox.MAX_UNSENT_BYTES", 1000)
    with Peer(rig) as deaf, Peer(rig) as peer:
        rig.wait(lambda r: len(r.socket.peers) == 2)
        deaf.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        number = 0
        while len(rig.socket.peers) == 2:
            number += 1
            assert number < 500, "it was not dropped"
            peer.send(ask(f"a{number}", max_tokens=50))
            peer.answer(f"a{number}")


def test_a_peer_that_goes_takes_its_requests_along(rig):
    rig.runner.delay = 0.01
    with Peer(rig) as peer:
        peer.send(ask("a", max_tokens=60), ask("b", max_tokens=60))
        rig.wait(lambda r: r.scheduler.num_running == 2)
    rig.wait(lambda r: not r.scheduler.has_work)
    rig.scheduler.check()


def test_an_abort_ends_a_request_even_in_the_message_that_brings_it(rig):
    rig.runner.delay = 0.01
    with Peer(rig) as peer:
        peer.send(ask("a", max_tokens=60), aborts=("a",))
        peer.send(ask("b", max_tokens=60))
        rig.wait(lambda r: r.scheduler.num_running == 1)
        peer.send(aborts=("b",))
        rig.wait(lambda r: not r.scheduler.has_work)
    rig.scheduler.check()


def test_an_idle_engine_says_that_its_cache_is_free_again(rig):
    rig.runner.delay = 0.01
    with Peer(rig) as peer:
        peer.send(ask("a", max_tokens=60))
        rig.wait(lambda r: r.state.read_heartbeat().kv_utilization > 0)
        peer.send(aborts=("a",))
        rig.wait(lambda r: r.state.read_heartbeat().kv_utilization == 0)


@pytest.mark.parametrize(
    "bad",
    [
        ask("bad", (100,)),
        ask("bad", (-1,)),
        ask("bad", ()),
        ask("bad", priority=-(1 << 30)),
        ask("bad", arrival=float("nan")),
        ask("bad", tuple(range(64)), 60),
        ask("taken", (1,)),
    ],
    ids=["token id", "negative", "empty", "priority", "arrival", "too long", "id in use"],
)
def test_a_bad_request_fails_alone(rig, bad):
    rig.runner.delay = 0.002
    with Peer(rig) as peer:
        peer.send(ask("taken", (1,), 40))
        peer.send(bad, ask("good"))
        outcomes = {}
        for event in peer.events():
            if event.finish_reason is not None:
                outcomes.setdefault(event.request_id, event)
            if "good" in outcomes and bad.request_id in outcomes:
                break
        assert outcomes[bad.request_id].finish_reason is FinishReason.ERROR
        assert outcomes[bad.request_id].error
        assert outcomes["good"].finish_reason is FinishReason.LENGTH


def test_readiness_begins_when_the_api_process_is_there(rig):
    assert rig.state.read_heartbeat().phase is Phase.WARMING
    with Peer(rig):
        rig.wait(lambda r: r.state.read_heartbeat().phase is Phase.SERVING)
        assert rig.state.read_heartbeat().steps >= 10, "no completion has run"


def test_a_step_in_progress_is_pending_work(rig):
    with Peer(rig) as peer:
        rig.wait(lambda r: r.state.read_heartbeat().phase is Phase.SERVING)
        assert not rig.state.read_heartbeat().work_pending
        rig.runner.delay = 0.3
        peer.send(ask("a", max_tokens=1))
        rig.wait(lambda r: r.state.read_heartbeat().work_pending, 1)
        peer.answer("a")
        rig.wait(lambda r: not r.state.read_heartbeat().work_pending)


def test_an_idle_engine_proves_itself_again(make_rig):
    rig = make_rig(canary_interval=0.1)
    with Peer(rig):
        rig.wait(lambda r: r.state.read_heartbeat().phase is Phase.SERVING)
        first = rig.state.read_heartbeat()
        rig.wait(lambda r: r.state.read_heartbeat().steps >= first.steps + 20)
        later = rig.state.read_heartbeat()
    assert later.proof_at > first.proof_at
    assert later.reason == ""


def test_other_tokens_than_at_warm_up_are_a_mismatch_for_good(make_rig):
    rig = make_rig(canary_interval=0.1)
    with Peer(rig) as peer:
        rig.wait(lambda r: r.state.read_heartbeat().phase is Phase.SERVING)
        rig.runner.skew = 1
        rig.wait(lambda r: r.state.read_heartbeat().reason == "CanaryMismatch")
        rig.runner.skew = 0
        peer.send(ask("a"))
        assert peer.answer("a")[0] == [6, 7, 8]
        assert rig.state.read_heartbeat().reason == "CanaryMismatch"


def test_the_wrong_canary_fault_is_one_wrong_rerun(make_rig, tmp_path):
    rig = make_rig(Faults({"wrong_canary": Fault("wrong_canary", 1, False)}, tmp_path), canary_interval=0.1)
    with Peer(rig):
        rig.wait(lambda r: r.state.read_heartbeat().reason == "CanaryMismatch")
        assert rig.state.read_heartbeat().steps == 30, "warm-up, a right rerun, and a wrong one"


def test_traffic_is_proof_so_a_busy_engine_runs_no_canary(make_rig):
    rig = make_rig(canary_interval=0.2)
    rig.runner.delay = 0.02
    with Peer(rig) as peer:
        peer.send(ask("a", max_tokens=40))
        peer.answer("a")
        assert rig.state.read_heartbeat().steps == 50, "a canary ran among real steps"


def test_a_lost_block_is_counted_and_logged_and_the_engine_goes_on(rig, monkeypatch, caplog):
    monkeypatch.setattr("quire_server.engine.loop._AUDIT_SECONDS", 0.0)
    with Peer(rig) as peer:
        rig.wait(lambda r: r.state.read_heartbeat().phase is Phase.SERVING)
        assert rig.scheduler.kv._blocks.allocate() is not None  # taken, and given to nobody
        peer.send(ask("a"))
        assert peer.answer("a")[0] == [6, 7, 8]
        stats = next(m.stats for m in peer.messages() if isinstance(m, Outbox) and m.stats.blocks_unaccounted)
    assert stats.blocks_unaccounted == 1
    assert sum("unaccounted" in record.message for record in caplog.records) == 1


def test_a_forced_queue_depth_is_reported(make_rig, tmp_path):
    rig = make_rig(Faults({"queue_depth": Fault("queue_depth", 42, False)}, tmp_path))
    with Peer(rig) as peer:
        peer.send(ask("a"))
        outbox = next(m for m in peer.messages() if isinstance(m, Outbox))
        assert outbox.stats.waiting == 42
        rig.wait(lambda r: r.state.read_heartbeat().queued == 42)
