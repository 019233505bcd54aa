"""Rank 0 takes in its own ranks alone: not a stranger, an earlier group or another revision."""

import errno
import os
import socket
import threading
from dataclasses import replace

import pytest

from quire_server.engine import rank_admission, rank_channel, step_codec
from quire_server.engine.codec import CodecError
from quire_server.engine.rank_admission import Admission, refusal
from quire_server.engine.rank_channel import (
    Channel,
    ChannelClosedError,
    Hello,
    Identity,
    Loaded,
    Refused,
    Welcome,
)
from quire_server.errors import RankLostError

OWN = Identity(step_codec.VERSION, "", "image", "model", "arguments")


def hello(rank, incarnation="", **others):
    return Hello(rank, incarnation, replace(OWN, **others))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (hello(1), None),
        (hello(2, "now"), None),
        (hello(1, protocol=0), "MixedRevision"),
        (hello(1, revision="r2"), "MixedRevision"),
        (hello(1, image="other"), "MixedRevision"),
        (hello(1, model="other"), "MixedRevision"),
        (hello(1, arguments="other"), "MixedRevision"),
        (hello(1, "then"), "OldIncarnation"),
        (hello(0), "NoSuchRank"),
        (hello(3), "NoSuchRank"),
        (hello(4), "NoSuchRank"),
        (hello(-1), "NoSuchRank"),
        (Loaded(5, "pod"), "NoHello"),
    ],
)
def test_only_ranks_that_are_missing_and_of_this_group_are_taken_in(message, reason):
    refused = refusal(message, OWN, 4, "now", {3})
    assert (refused and refused.reason) == reason


def test_what_differs_is_named():
    refused = refusal(hello(2, image="other", model="other"), OWN, 4, "now", set())
    assert refused.message == "rank 2 has another image and model than rank 0"


def test_no_two_groups_have_one_name():
    assert len({rank_admission.draw_incarnation() for _ in range(100)}) == 100


class Leader:
    """Rank 0, which waits for its ranks on a thread."""

    def __init__(self, directory, size=2, seconds=60.0):
        self.listener = rank_channel.listen(directory, 8)
        self.admission = Admission(self.listener, OWN, size)
        self._directory, self._seconds, self._result = directory, seconds, None
        self._channels = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()
        return self

    def _run(self):
        try:
            self._result = self.admission.admit(self._seconds)
        except RankLostError as error:
            self._result = error

    def result(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._result

    def connect(self):
        self._channels.append(Channel.connect(self._directory, 20))
        return self._channels[-1]

    def close(self):
        joined = self._result.values() if isinstance(self._result, dict) else ()
        for each in (self.listener, *self._channels, *joined, *self.admission._joined.values()):
            each.close()


@pytest.fixture
def leader(tmp_path):
    found = Leader(tmp_path)
    yield found
    found.close()


def test_rank_0_waits_for_its_rank_beside_strangers(leader, monkeypatch):
    monkeypatch.setattr(rank_admission, "_HELLO_SECONDS", 1.0)
    leader.start()
    silent, strangers = leader.connect(), []
    for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5\xc1\xc1\xc1\xc1\xc1", b"\0\0\0\0"):
        stranger = leader.connect()
        stranger._connection.sendall(data)
        strangers.append(stranger)
    for stranger in strangers:
        assert isinstance(stranger.hear(30), Refused)
    assert silent.hear(30) == Refused("NoHello", "it said nothing")
    half = leader.connect()
    half._connection.sendall(b"\0\0")
    other, old = leader.connect(), leader.connect()
    other.say(hello(1, model="other"))
    old.say(hello(1, "an earlier group"))
    assert other.hear(30).reason == "MixedRevision"
    assert old.hear(30).reason == "OldIncarnation"
    right = leader.connect()
    right.say(hello(1))
    joined = leader.result()
    assert list(joined) == [1]
    joined[1].say(Welcome("gloo", "x"))
    assert right.hear(30) == Welcome("gloo", "x")
    with pytest.raises((ChannelClosedError, CodecError)):
        half.hear(30)


def test_who_goes_before_it_is_refused_disturbs_nobody(leader):
    gone = leader.connect()
    gone.say(hello(1, image="other"))
    gone.close()
    right = leader.connect()
    right.say(hello(1))
    assert list(leader.start().result()) == [1]


def test_countless_silent_connections_keep_no_rank_out(leader, monkeypatch):
    monkeypatch.setattr(rank_admission, "_MAX_STRANGERS", 4)
    leader.start()
    crowd = [leader.connect() for _ in range(12)]
    right = leader.connect()
    right.say(hello(1))
    assert list(leader.result()) == [1]
    assert crowd[0].hear(30).message == "others wait behind it"


def test_a_rank_that_does_not_come_is_named_with_the_last_refusal(tmp_path):
    leader = Leader(tmp_path, size=3, seconds=1.5).start()
    first, other = leader.connect(), leader.connect()
    first.say(hello(1))
    other.say(hello(2, arguments="other"))
    error = str(leader.result())
    leader.close()
    assert error.startswith("Rank 2 of 3 did not join within 1.5 s.")
    assert "rank 2 has another arguments than rank 0" in error


def test_a_rank_that_ends_while_others_are_waited_for_may_come_again(tmp_path):
    """Its container restarts: LeaderWorkerSet recreates no group of which a pod has not started yet."""
    leader = Leader(tmp_path, size=3).start()
    first = leader.connect()
    first.say(hello(1))
    early = leader.connect()
    early.say(hello(1))
    assert early.hear(30).reason == "NoSuchRank", "the first one has joined"
    first.close()
    again = leader.connect()
    again.say(hello(1))
    last = leader.connect()
    last.say(hello(2))
    joined = leader.result()
    assert set(joined) == {1, 2}
    joined[1].say(Welcome("gloo", "x"))
    assert again.hear(30) == Welcome("gloo", "x")
    leader.close()


def test_once_all_have_come_nobody_can_connect(leader, tmp_path):
    right = leader.connect()
    right.say(hello(1))
    assert list(leader.start().result()) == [1]
    rank_channel.stop_listening(leader.listener, tmp_path)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(FileNotFoundError):
        late.connect(str(tmp_path / rank_channel.SOCKET_NAME))


def test_a_rank_is_taken_in_after_its_connection_could_not_be_accepted(leader, monkeypatch, caplog):
    """In this process; tests/server/test_acceptor.py takes all descriptors away, for real."""
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 2

    def failing(listener):
        if failures and listener is leader.listener:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    right = leader.connect()
    right.say(hello(1))
    assert list(leader.start().result()) == [1]
    assert failures == []
    assert caplog.text.count("a connection cannot be accepted") == 1
