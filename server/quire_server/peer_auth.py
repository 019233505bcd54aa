"""What the ports between servers, and between ranks of several nodes, have in common: the key that both ends
prove to have, a bound for connections that have not proved anything yet, and accepting them whatever fails.

The key comes from a Secret that all pods of a model mount, so that no port needs a Secret of its own. Knows
neither protocol: how a key is proved is up to each of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_UNPROVED = 32
PAUSE_SECONDS = 0.1  # after a connection that could not be accepted
_LOG_SECONDS = 60.0  # between two lines of the log about that


class PeerKeyError(Exception):
    """There is no key, or it cannot be read now."""


def read_key(directory: Path | None) -> bytes:
    """The key that all entries of a mounted Secret give together, since a client may know one of them; empty
    without a directory. Raises PeerKeyError for a Secret without content, whose key anyone could compute,
    and while the kubelet replaces the files, of which its own ones begin with a dot.
    """
    if directory is None:
        return b""
    digest, is_empty = hashlib.sha256(b"quire peers\0"), True
    try:
        for file in sorted(directory.iterdir()):
            if file.name.startswith(".") or not file.is_file():
                continue
            content = file.read_bytes().strip()
            is_empty = is_empty and not content
            for part in (file.name.encode(), content):
                digest.update(len(part).to_bytes(8, "big") + part)
    except OSError as error:
        raise PeerKeyError(f"the key cannot be read ({error.strerror}: {error.filename})") from None
    if is_empty:
        raise PeerKeyError(f"there is no key: all entries of the Secret in {directory} are empty")
    return digest.digest()


class UnprovedConnections:
    """Connections whose other end has not proved anything yet. For one more than there may be, the oldest is
    shut down: else clients without the key could occupy all places, and keep out those that have it.
    """

    def __init__(self, most: int = MAX_UNPROVED) -> None:
        self._most = most
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """A connection was accepted."""
        with self._lock:
            if len(self._connections) >= self._most:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # its other end has reset it
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for its proof
            self._connections[connection] = None

    def remove(self, connection: socket.socket) -> None:
        """It has proved what it has to, or is to be closed: afterwards it is not shut down from here."""
        with self._lock:
            self._connections.pop(connection, None)


class Acceptor:
    """Accepts the connections of a listening socket until it is closed, each in ``serve`` on a thread of its
    own. What fails meanwhile (no descriptor or thread is left, the other end has gone) is over some time:
    connections wait in the kernel's queue until then.
    """

    def __init__(
        self,
        listener: socket.socket,
        unproved: UnprovedConnections,
        serve: Callable[[socket.socket], None],
        name: str,
    ) -> None:
        self._listener, self._unproved, self._serve, self._name = listener, unproved, serve, name
        self._closed = threading.Event()
        self._logged_at = -_LOG_SECONDS
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the thread was awake, and has closed it
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a close alone would not

    def _run(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    self._take(self._listener.accept()[0])
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                    if not self._closed.is_set():
                        self._log(error)
                        self._closed.wait(PAUSE_SECONDS)

    def _take(self, connection: socket.socket) -> None:
        self._unproved.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._unproved.remove(connection)
            connection.close()
            raise

    def _log(self, error: Exception) -> None:
        if time.monotonic() >= self._logged_at + _LOG_SECONDS:
            self._logged_at = time.monotonic()
            facts = {"port": self._name, "why": str(error)}
            logger.warning("a connection cannot be accepted, it is tried again", extra=facts)
