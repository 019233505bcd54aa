"""Where ranks of several nodes meet: the leader listens on its pod's address, the others connect to it.

Connections are authenticated (``rank_auth``) before a byte of them is parsed, each by a thread of its own, so
that a stranger who says nothing keeps no rank waiting. Ranks of one node use a unix socket instead
(``rank_channel.listen``). A dead link is noticed by the kernel, also while nothing is sent.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from quire_server.engine import rank_auth
from quire_server.engine.rank_auth import RankAuthError
from quire_server.peer_auth import Acceptor, UnprovedConnections

logger = logging.getLogger(__name__)

PORT = 7600
_BACKLOG = 32
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_REFUSED_SECONDS = 10.0  # kubelets bring a new version of the Secret to the pods at different times
# A peer that acknowledges nothing for so long is gone: as long as one of a stage waits for another one. All
# ranks have to end, with an error for every stream, within five seconds.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 2}
_UNACKNOWLEDGED_MILLISECONDS = 3000


class RankListener:
    """A listening socket that gives authenticated connections only. Its descriptor is readable when there is
    one.
    """

    def __init__(self, address: str, port: int, key: Callable[[], bytes]) -> None:
        """``key``: called for each connection, as the Secret may change while ranks wait."""
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self.port = int(listener.getsockname()[1])
        self._key = key
        self._admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wakes, self._wake = socket.socketpair()
        self._unproved = UnprovedConnections()
        self._lock, self._is_closed = threading.Lock(), False
        self._acceptor = Acceptor(listener, self._unproved, self._admit, "ranks")

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._wakes.fileno()

    def accept(self) -> tuple[socket.socket, None]:
        """The next connection, as of a socket, but without an address: its other end may have reset it."""
        self._wakes.recv(1)
        return self._admitted.get(), None

    def close(self) -> None:
        """Take no more connections, and close those that were not taken."""
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
        while not self._admitted.empty():
            self._admitted.get().close()
        self._wakes.close()
        self._wake.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            rank_auth.admit(connection, self._key())
        except RankAuthError as error:
            logger.warning("refused a connection to the ranks: %s", error)
            self._unproved.remove(connection)
            connection.close()
        else:
            self._unproved.remove(connection)
            watch_link(connection)
            self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._admitted.put(connection)
            self._wake.send(b"\0")


def connect(address: str, port: int, key: Callable[[], bytes], timeout: float) -> socket.socket:
    """Connect to the leader, whose name may not resolve and which may not listen yet. Raises RankAuthError
    if it refuses for long, TimeoutError if it cannot be reached in time.
    """
    deadline, refused_since = time.monotonic() + timeout, 0.0
    while True:
        try:
            return _enter(address, port, key())
        except RankAuthError as error:
            now = time.monotonic()
            refused_since = refused_since or now
            if now > min(deadline, refused_since + _REFUSED_SECONDS):
                raise
            logger.info("the leader is asked again: %s", error)
        except OSError as error:
            refused_since = 0.0
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address}:{port} cannot be reached: {error}") from None
        time.sleep(_RETRY_SECONDS)  # no event says that the leader listens; this is once, at the start


def _enter(address: str, port: int, key: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    try:
        rank_auth.enter(connection, key)
    except RankAuthError:
        connection.close()
        raise
    watch_link(connection)
    return connection


def watch_link(connection: socket.socket) -> None:
    """Have the kernel fail the connection three seconds after the other node has fallen silent, and send
    small messages at once.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
