"""The engine core's loop on a real socket, with a real scheduler and a runner without tensors."""

import os
import pickle
import socket

import pytest

from quire_server.core.request import FinishReason
from quire_server.core.stats import EngineStats
from quire_server.engine.messages import EngineInfo, EngineOutputs, to_frame
from quire_server.fault_injection import Fault, Faults
from quire_server.health.heartbeat import Phase
from tests.server.engine.peer import Peer, make_request


def test_a_request_is_answered_and_the_engine_sends_its_info(engine):
    with Peer(engine) as peer:
        assert next(peer.messages()) == EngineInfo(64, 100, 32, 8, 4)
        peer.send(make_request("a"))
        assert peer.answer("a")[0] == [6, 7, 8]


def test_each_peer_gets_only_the_events_of_its_own_requests(engine):
    with Peer(engine) as one, Peer(engine) as two:
        one.send(make_request("a", (10,), 20))
        two.send(make_request("b", (50,), 20))
        assert one.answer("a")[0] == list(range(11, 31))
        assert two.answer("b")[0] == list(range(51, 71))


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff" + os.urandom(4095),  # no length that a frame may have
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps({"a": 1}),
        b"\x00\x00\x00\x01\xc1",
        to_frame(EngineOutputs((), EngineStats())),
    ],
    ids=["random", "http", "pickle", "bad msgpack", "a message of the engine"],
)
def test_a_peer_that_sends_invalid_data_is_disconnected_and_others_are_served(engine, noise):
    with Peer(engine) as faulty, Peer(engine) as peer:
        faulty.connection.sendall(noise)
        assert list(faulty.events()) == [], "the connection was not closed"
        peer.send(make_request("a"))
        assert peer.answer("a")[0] == [6, 7, 8]


def test_a_peer_that_does_not_read_is_disconnected(engine, monkeypatch):
    monkeypatch.setattr("quire_server.engine.socket_server.MAX_UNSENT_BYTES", 1000)
    with Peer(engine) as unread, Peer(engine) as peer:
        engine.wait(lambda engine: len(engine.socket.peers) == 2)
        unread.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        number = 0
        while len(engine.socket.peers) == 2:
            number += 1
            assert number < 500, "it was not dropped"
            peer.send(make_request(f"a{number}", max_tokens=50))
            peer.answer(f"a{number}")


def test_requests_of_a_disconnected_peer_are_aborted(engine):
    engine.runner.delay = 0.01
    with Peer(engine) as peer:
        peer.send(make_request("a", max_tokens=60), make_request("b", max_tokens=60))
        engine.wait(lambda engine: engine.scheduler.num_running == 2)
    engine.wait(lambda engine: not engine.scheduler.has_work)
    engine.scheduler.check()


def test_an_abort_in_the_message_that_adds_the_request_ends_it(engine):
    engine.runner.delay = 0.01
    with Peer(engine) as peer:
        peer.send(make_request("a", max_tokens=60), aborts=("a",))
        peer.send(make_request("b", max_tokens=60))
        engine.wait(lambda engine: engine.scheduler.num_running == 1)
        peer.send(aborts=("b",))
        engine.wait(lambda engine: not engine.scheduler.has_work)
    engine.scheduler.check()


def test_after_the_last_request_the_reported_cache_use_is_zero(engine):
    engine.runner.delay = 0.01
    with Peer(engine) as peer:
        peer.send(make_request("a", max_tokens=60))
        engine.wait(lambda engine: engine.state.read_heartbeat().kv_utilization > 0)
        peer.send(aborts=("a",))
        engine.wait(lambda engine: engine.state.read_heartbeat().kv_utilization == 0)


@pytest.mark.parametrize(
    "bad",
    [
        make_request("bad", (100,)),
        make_request("bad", (-1,)),
        make_request("bad", ()),
        make_request("bad", priority=-(1 << 30)),
        make_request("bad", arrival=float("nan")),
        make_request("bad", tuple(range(64)), 60),
        make_request("taken", (1,)),
    ],
    ids=["token id", "negative", "empty", "priority", "arrival", "too long", "id in use"],
)
def test_an_invalid_request_fails_and_others_are_answered(engine, bad):
    engine.runner.delay = 0.002
    with Peer(engine) as peer:
        peer.send(make_request("taken", (1,), 40))
        peer.send(bad, make_request("good"))
        outcomes = {}
        for event in peer.events():
            if event.finish_reason is not None:
                outcomes.setdefault(event.request_id, event)
            if "good" in outcomes and bad.request_id in outcomes:
                break
        assert outcomes[bad.request_id].finish_reason is FinishReason.ERROR
        assert outcomes[bad.request_id].error
        assert outcomes["good"].finish_reason is FinishReason.LENGTH


def test_the_engine_is_serving_once_the_api_process_is_connected(engine):
    assert engine.state.read_heartbeat().phase is Phase.WARMING
    with Peer(engine):
        engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
        assert engine.state.read_heartbeat().steps >= 10, "the warm-up completion has not run"


def test_a_step_in_progress_is_pending_work(engine):
    with Peer(engine) as peer:
        engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
        assert not engine.state.read_heartbeat().work_pending
        engine.runner.delay = 0.3
        peer.send(make_request("a", max_tokens=1))
        engine.wait(lambda engine: engine.state.read_heartbeat().work_pending)
        peer.answer("a")
        engine.wait(lambda engine: not engine.state.read_heartbeat().work_pending)


def test_a_leaked_block_is_counted_and_logged_and_the_engine_continues(engine, monkeypatch, caplog):
    monkeypatch.setattr("quire_server.engine.engine_core._BLOCK_CHECK_SECONDS", 0.0)
    with Peer(engine) as peer:
        engine.wait(lambda engine: engine.state.read_heartbeat().phase is Phase.SERVING)
        assert engine.scheduler.kv._pool.allocate() is not None  # leaked
        peer.send(make_request("a"))
        assert peer.answer("a")[0] == [6, 7, 8]
        stats = next(
            m.stats for m in peer.messages() if isinstance(m, EngineOutputs) and m.stats.blocks_unaccounted
        )
    assert stats.blocks_unaccounted == 1
    assert sum("unaccounted" in record.message for record in caplog.records) == 1


def test_a_forced_queue_depth_is_reported(start_engine, tmp_path):
    engine = start_engine(Faults({"queue_depth": Fault("queue_depth", 42, False)}, tmp_path))
    with Peer(engine) as peer:
        peer.send(make_request("a"))
        outbox = next(m for m in peer.messages() if isinstance(m, EngineOutputs))
        assert outbox.stats.waiting == 42
        engine.wait(lambda engine: engine.state.read_heartbeat().queued == 42)


def test_pinned_blocks_are_free_again_after_their_time_though_the_engine_is_idle(engine):
    """They count as used memory, by which autoscalers and admission decide."""
    with Peer(engine) as peer:
        peer.send(make_request("a", range(1, 17), cache_ttl=1.0))
        peer.answer("a")
        engine.wait(lambda engine: engine.state.read_heartbeat().kv_utilization == 2 / 32)
        engine.wait(lambda engine: engine.state.read_heartbeat().kv_utilization == 0)
        stats = next(message.stats for message in peer.messages() if not message.stats.kv.pinned)
        assert stats.kv_utilization == 0
