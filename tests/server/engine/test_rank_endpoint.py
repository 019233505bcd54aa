"""Ranks of several nodes meet at the leader's address: those with the key alone."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from quire_server import peer_auth
from quire_server.engine import rank_auth, rank_endpoint
from quire_server.engine.rank_auth import RankAuthError
from quire_server.engine.rank_endpoint import RankListener

ADDRESS, KEY = "127.0.0.1", b"k" * 32


def key() -> bytes:
    return KEY


@pytest.fixture
def listener() -> Iterator[RankListener]:
    found = RankListener(ADDRESS, 0, key)
    yield found
    found.close()


def accept(listener: RankListener) -> socket.socket:
    assert select.select([listener], [], [], 5)[0], "a connection is let in"
    return listener.accept()[0]


def test_a_rank_with_the_key_is_let_in_and_its_bytes_come_through(listener: RankListener) -> None:
    worker = rank_endpoint.connect(ADDRESS, listener.port, key, 5)
    leader = accept(listener)
    with worker, leader:
        worker.sendall(b"hello")
        assert leader.recv(5) == b"hello"
        leader.sendall(b"welcome")
        assert worker.recv(7) == b"welcome"


def test_a_rank_with_another_key_is_refused_and_told_so(listener: RankListener) -> None:
    with pytest.raises(RankAuthError, match="another key"):
        rank_endpoint.connect(ADDRESS, listener.port, lambda: b"other", 0)
    assert not select.select([listener], [], [], 0)[0], "none was let in"


def test_a_listener_without_the_key_learns_nothing_and_is_not_believed() -> None:
    with RankListenerOf(b"other") as port, pytest.raises(RankAuthError):
        rank_endpoint.connect(ADDRESS, port, key, 0)


class RankListenerOf:
    def __init__(self, key: bytes) -> None:
        self._listener = RankListener(ADDRESS, 0, lambda: key)

    def __enter__(self) -> int:
        return self._listener.port

    def __exit__(self, *_: object) -> None:
        self._listener.close()


RANDOM = random.Random(1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", RANDOM.randbytes(64), RANDOM.randbytes(1 << 16), b"GET / HTTP/1.1\r\n\r\n" * 9],
    ids=["nothing", "zero", "64", "65536", "HTTP"],
)
def test_random_bytes_are_refused_and_ranks_are_still_let_in(listener: RankListener, data: bytes) -> None:
    with socket.create_connection((ADDRESS, listener.port), 5) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
        except OSError:
            pass  # it was reset
    with rank_endpoint.connect(ADDRESS, listener.port, key, 5) as worker:
        leader = accept(listener)
        with leader:
            assert leader.getpeername() == worker.getsockname()


def test_a_changed_secret_is_read_by_the_next_try(tmp_path: Path) -> None:
    """Kubelets bring a new version to the pods of a group at different times."""
    for each in ("leader", "worker"):
        (tmp_path / each).mkdir()
        (tmp_path / each / "key").write_text(each)
    keys = [partial(rank_auth.key_of, tmp_path / each) for each in ("leader", "worker")]
    found = RankListener(ADDRESS, 0, keys[0])
    with pytest.raises(RankAuthError):
        rank_endpoint.connect(ADDRESS, found.port, keys[1], 0)
    (tmp_path / "leader" / "key").write_text("worker")
    with rank_endpoint.connect(ADDRESS, found.port, keys[1], 0), accept(found):
        found.close()


def test_a_key_that_is_missing_for_a_moment_refuses_and_ends_nothing(tmp_path: Path) -> None:
    found = RankListener(ADDRESS, 0, partial(rank_auth.key_of, tmp_path / "key"))
    with pytest.raises(RankAuthError, match="closed the connection"):
        rank_endpoint.connect(ADDRESS, found.port, lambda: b"", 0)
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "password").write_text("ours")
    with rank_endpoint.connect(ADDRESS, found.port, partial(rank_auth.key_of, tmp_path / "key"), 0):
        accept(found).close()
    found.close()


def test_strangers_who_say_nothing_keep_no_rank_waiting(listener: RankListener) -> None:
    strangers = [socket.create_connection((ADDRESS, listener.port), 5) for _ in range(peer_auth.MAX_UNPROVED)]
    for stranger in strangers:
        stranger.settimeout(5)
        assert stranger.recv(1), "all of them are listened to"
    with rank_endpoint.connect(ADDRESS, listener.port, key, 0):
        leader = accept(listener)
        leader.close()
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_hangs_up_once_it_was_let_in_disturbs_no_other(listener: RankListener) -> None:
    with rank_endpoint.connect(ADDRESS, listener.port, key, 5) as gone:
        assert select.select([listener], [], [], 5)[0]
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
    with accept(listener) as ended:
        ended.settimeout(5)
        with pytest.raises(ConnectionResetError):
            ended.recv(1)
    with rank_endpoint.connect(ADDRESS, listener.port, key, 5), accept(listener):
        pass


def test_a_rank_waits_for_a_leader_that_does_not_listen_yet() -> None:
    with socket.create_server((ADDRESS, 0)) as reserved:
        port = int(reserved.getsockname()[1])
    found: list[socket.socket] = []
    worker = threading.Thread(target=lambda: found.append(rank_endpoint.connect(ADDRESS, port, key, 10)))
    worker.start()
    late = RankListener(ADDRESS, port, key)
    leader = accept(late)
    worker.join(60)
    assert len(found) == 1
    late.close()
    for each in (leader, *found):
        each.close()


def test_a_leader_that_never_listens_is_named() -> None:
    with pytest.raises(TimeoutError, match="127.0.0.1:1 cannot be reached"):
        rank_endpoint.connect(ADDRESS, 1, key, 0)


def test_a_connection_that_has_ended_is_no_rank() -> None:
    near, far = socket.socketpair()
    far.close()
    with near, pytest.raises(RankAuthError, match="does not listen"):
        rank_auth.admit(near, b"key")


def test_a_proof_is_of_no_use_for_another_connection() -> None:
    """An exchange that was overheard cannot be repeated: both sides draw anew."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        leader = threading.Thread(target=lambda: rank_auth.admit(ours, KEY))
        leader.start()
        recorded: list[bytes] = []
        rank_auth.enter(_Recording(theirs, recorded), KEY)  # type: ignore[arg-type]  # a socket that records
        leader.join(60)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        failures: list[Exception] = []

        def admit() -> None:
            try:
                rank_auth.admit(ours, KEY)
            except RankAuthError as error:
                failures.append(error)

        leader = threading.Thread(target=admit)
        leader.start()
        theirs.recv(1 << 10)
        theirs.sendall(b"".join(recorded))
        leader.join(60)
        assert "another key" in str(failures[0])


class _Recording:
    def __init__(self, connection: socket.socket, sent: list[bytes]) -> None:
        self._connection, self._sent = connection, sent
        self.settimeout, self.recv = connection.settimeout, connection.recv

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)
        self._connection.sendall(data)
