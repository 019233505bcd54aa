"""What the ports between servers, and between ranks of several nodes, have in common: the key that both ends
prove to have, and a bound for connections that have not proved anything yet.

The key comes from a Secret that all pods of a model mount, so that no port needs a Secret of its own. Knows
neither protocol: how a key is proved is up to each of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from pathlib import Path

MAX_UNPROVED = 32


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
