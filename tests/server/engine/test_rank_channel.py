"""Connections between ranks: each wait ends, and what is no message is refused."""

import socket
import threading
import time

import pytest

from quire_server.core.rank_step import Echo, EchoStatus, RankStep
from quire_server.core.step import Step
from quire_server.engine import rank_channel, rank_group, step_codec
from quire_server.engine.codec import CodecError, encode
from quire_server.engine.rank_channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Loaded,
    Patience,
    Prepared,
)
from quire_server.engine.rank_group import RankGroup
from quire_server.errors import RankLostError


@pytest.fixture
def pair():
    near, far = socket.socketpair()
    yield near, far
    near.close()
    far.close()


def frame(body):
    return len(body).to_bytes(4, "big") + body


def test_the_end_of_the_other_side_ends_each_wait(pair):
    near, far = pair
    far.sendall(b"\0\0")  # a part of a frame
    far.close()
    with pytest.raises(ChannelClosedError):
        Channel(near).receive(100, 5.0)
    with pytest.raises(ChannelClosedError):
        Channel(near).send(b"x", 5.0)


def test_a_connection_that_is_reset_has_ended(pair):
    near, far = pair
    near.sendall(b"never read")
    far.close()
    with pytest.raises(ChannelClosedError):
        Channel(near).receive(100, 5.0)


def test_a_side_that_neither_reads_nor_writes_is_waited_for_no_longer_than_told(pair):
    near, _ = pair
    with pytest.raises(ChannelTimeoutError):
        Channel(near).receive(100, 0.05)
    with pytest.raises(ChannelTimeoutError):
        Channel(near).send(bytes(32 << 20), 0.05)


def test_a_pause_of_this_process_uses_up_no_patience(monkeypatch):
    now = 0.0
    monkeypatch.setattr(rank_channel.time, "monotonic", lambda: now)
    patience = Patience(1.0)
    for seconds in (60.0, 60.0, 0.1, 0.1):
        patience.begin()
        now += seconds
        patience.end()
    assert not patience.is_over
    for _ in range(3):
        patience.begin()
        now += 0.2
        patience.end()
    assert patience.is_over


def test_nobody_is_found_where_nobody_listens(tmp_path):
    with pytest.raises(ChannelTimeoutError):
        Channel.connect(tmp_path, 0.1)


def test_a_rank_that_comes_before_rank_0_listens_finds_it(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(Channel.connect(tmp_path, 20)))
    thread.start()
    with rank_channel.listen(tmp_path, 1) as listener:
        listener.accept()[0].close()
        thread.join()
    assert len(found) == 1
    found[0].close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is longer than"),
        (frame(b""), "not msgpack"),
        (frame(b"\xc1"), "not msgpack"),
        (frame(encode([99, []])), "unknown message 99"),
        (frame(encode([-1, []])), "unknown message -1"),
        (frame(encode({"a": 1})), "expected"),
        (frame(encode([True, []])), "expected"),
        (frame(encode([0, ["1"]])), "fields"),
    ],
)
def test_bytes_that_are_no_message_are_refused(pair, data, message):
    near, far = pair
    far.sendall(data)
    with pytest.raises(CodecError, match=message):
        Channel(near).hear(5.0)


EMPTY = RankStep(Step(1, (), (), (), (), (), ()))


def test_a_rank_that_takes_no_step_is_named(pair):
    near, far = pair
    lost = []
    group = RankGroup({2: Channel(near)}, lost.append, deadline=0.1)
    far.close()
    with pytest.raises(RankLostError, match="not echoed by rank 2 of 2"):
        group.send(EMPTY)
    assert lost == [2]


def test_a_rank_whose_echo_is_no_echo_is_named(pair):
    near, far = pair
    group = RankGroup({1: Channel(near)})
    group.send(EMPTY)
    Channel(far).send(b"\x07")
    with pytest.raises(RankLostError, match="Rank 1 echoed no step"):
        group.collect()


@pytest.fixture
def two_others(monkeypatch):
    """Rank 0's channels to ranks 1 and 2, and their ends of them. A round of looking at them is short."""
    monkeypatch.setattr(rank_group, "DEADLINE", 0.2)
    pairs = [socket.socketpair() for _ in range(2)]
    yield {rank: Channel(near) for rank, (near, _) in enumerate(pairs, 1)}, [Channel(far) for _, far in pairs]
    for each in pairs:
        for end in each:
            end.close()


def echo(group, status=EchoStatus.DONE):
    return step_codec.encode_echo(Echo(group._encoder.sequence, group._encoder.digest, status))


@pytest.mark.parametrize(("how", "lost_first"), [("waited in vain", 1), ("closed", 2)])
def test_a_later_rank_that_waited_in_vain_or_has_gone_is_heard_before_a_late_one(two_others, how, lost_first):
    """A stage may take minutes for a long prompt; the ranks of one stage wait less for each other."""
    near, (_, second) = two_others
    lost, began_at = [], time.monotonic()
    group = RankGroup(near, lost.append, deadline=30.0)
    group.send(EMPTY)
    if how == "closed":
        second.close()
    else:
        second.send(echo(group, EchoStatus.LOST_PEER))
    with pytest.raises(RankLostError, match=f"not echoed by rank {lost_first}"):
        group.collect()
    assert time.monotonic() - began_at < 15.0
    assert lost == [lost_first]


def test_a_rank_that_is_late_but_within_its_deadline_is_waited_for(two_others):
    near, (first, second) = two_others
    group = RankGroup(near, deadline=30.0)
    group.send(EMPTY)
    second.send(echo(group))
    late = threading.Timer(1.0, lambda: first.send(echo(group)))
    late.start()
    assert not group.collect().is_out_of_memory
    late.join()


@pytest.mark.parametrize("how", ["ends", "is silent", "sends no message", "sends another message"])
def test_a_rank_that_does_not_load_is_named(pair, how):
    near, far = pair
    if how == "ends":
        far.close()
    elif how == "sends no message":
        far.sendall(frame(b"\xc1"))
    elif how == "sends another message":
        Channel(far).say(Prepared(True))
    with pytest.raises(RankLostError, match="Rank 1"):
        RankGroup({1: Channel(near)}).agree_on_blocks(5, bool, 0.1)


def test_all_ranks_are_told_the_smallest_number_of_blocks(pair):
    near, far = pair
    channel = Channel(far)
    channel.say(Loaded(7, "pod-1" + "x" * 1000))
    hosts = {}
    assert RankGroup({1: Channel(near)}).agree_on_blocks(9, bool, 5.0, on_loaded=hosts.__setitem__) == 7
    assert hosts == {1: ("pod-1" + "x" * 1000)[:253]}, "as long as the name of a pod may be"
    assert channel.hear(5.0).num_blocks == 7
