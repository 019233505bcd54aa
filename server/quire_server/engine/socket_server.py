"""The engine's unix socket: connections, their inputs, and outputs that are not written yet.

It runs on the engine's only thread, so it never blocks on a peer: reads wait for at most the given time,
writes are buffered. A peer that sends an invalid message, or does not read, loses its connection and its
requests.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from dataclasses import dataclass, field
from pathlib import Path

from quire_server.core.request import Request
from quire_server.engine.codec import CodecError
from quire_server.engine.messages import (
    EngineInfo,
    EngineInputs,
    FrameReader,
    LoadAdapter,
    Message,
    to_frame,
)

logger = logging.getLogger(__name__)

SOCKET_NAME = "engine.sock"
_MAX_PEERS = 8
MAX_UNSENT_BYTES = 64 * 1024 * 1024
_READ_SIZE = 1 << 18
_MAX_LOGGED = 256  # requests in one line of the log


@dataclass(eq=False)
class Peer:
    """One connection. `requests`: ids of its requests, which are aborted when it closes. `num_received`: how
    many the engine has taken in, failed ones included.
    """

    connection: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    requests: set[str] = field(default_factory=set)
    num_received: int = 0
    is_full: bool = False  # the socket's send buffer: `unsent` waits until it can be written to


@dataclass(frozen=True)
class PolledInputs:
    """The inputs that one poll received, from all peers."""

    requests: tuple[tuple[Peer, Request], ...]
    aborts: tuple[str, ...]
    reset_cache: bool
    finished: tuple[str, ...]
    adapter_loads: tuple[LoadAdapter, ...] = ()
    adapter_drops: tuple[str, ...] = ()


class EngineSocket:
    """A listening unix socket and its connections."""

    def __init__(self, run_dir: Path, info: EngineInfo) -> None:
        self._info_frame, self._announcement = to_frame(info), b""
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._slow_peers: set[Peer] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Renamed after listen(), so that a client that finds the name can connect.
        temporary = run_dir / (SOCKET_NAME + ".new")
        self._listener.bind(str(temporary))
        temporary.chmod(0o600)
        self._listener.listen(_MAX_PEERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        temporary.rename(run_dir / SOCKET_NAME)
        self._is_woken = False
        self._wake_reader, self._waker = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._wake_reader)

    def wake(self) -> None:
        """End the wait of ``poll``; from any thread, also of one that ends after the engine."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # the sockets are closed: there is no poll to wake
                self._waker.send(b"w")

    def poll(self, timeout: float) -> PolledInputs:
        """Wait up to `timeout` seconds for an event on any connection; returns the inputs that arrived."""
        requests: list[tuple[Peer, Request]] = []
        aborts: list[str] = []
        finished: list[str] = []
        reset_cache = False
        loads: list[LoadAdapter] = []
        drops: list[str] = []
        for peer in self._slow_peers & self._peers:
            aborts.extend(self._drop(peer, "does not read"))
        self._slow_peers.clear()
        for key, mask in self._selector.select(timeout):
            if key.data is None:
                self._accept()
                continue
            if key.data is self._wake_reader:
                self._is_woken = False  # before the read, or a wake between the two would be lost
                self._wake_reader.recv(_READ_SIZE)
                continue
            peer = key.data
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)
            if mask & selectors.EVENT_READ and peer in self._peers:
                for message in self._read(peer, aborts):
                    if not isinstance(message, EngineInputs):
                        aborts.extend(
                            self._drop(peer, f"sent {type(message).__name__}, which only the engine sends")
                        )
                        break
                    requests.extend((peer, request) for request in message.requests)
                    aborts.extend(message.aborts)
                    finished.extend(message.finished)
                    reset_cache |= message.reset_cache
                    loads.extend(message.adapter_loads)
                    drops.extend(message.adapter_drops)
        return PolledInputs(
            tuple(requests), tuple(aborts), reset_cache, tuple(finished), tuple(loads), tuple(drops)
        )

    def announce(self, message: Message) -> None:
        """Send a message to all peers, and as the second message to those that come, until the next one."""
        self._announcement = to_frame(message)
        for peer in self.peers:
            self.send(peer, message)

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message. A peer with too many unsent bytes is dropped by the next poll."""
        if peer in self._peers:
            peer.unsent += to_frame(message)
            self._flush(peer)
            if len(peer.unsent) > MAX_UNSENT_BYTES:
                self._slow_peers.add(peer)

    def close(self) -> None:
        """Close all connections and the socket."""
        for peer in self.peers:
            self._drop(peer, "")
        self._selector.close()
        for each in (self._listener, self._wake_reader, self._waker):
            each.close()

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The open connections."""
        return tuple(self._peers)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if len(self._peers) >= _MAX_PEERS:
            connection.close()
            return
        connection.setblocking(False)
        peer = Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        peer.unsent += self._info_frame + self._announcement
        self._flush(peer)

    def _read(self, peer: Peer, aborts: list[str]) -> list[Message]:
        try:
            data = peer.connection.recv(_READ_SIZE)
            if data:
                return peer.reader.feed(data)
            why = ""
        except (CodecError, OSError) as error:
            why = str(error)
        aborts.extend(self._drop(peer, why))
        return []

    def _flush(self, peer: Peer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.connection.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # the next read finds the connection closed and drops the peer
        if bool(peer.unsent) != peer.is_full:
            peer.is_full = not peer.is_full
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_full else 0)
            self._selector.modify(peer.connection, wanted, peer)

    def _drop(self, peer: Peer, why: str) -> set[str]:
        """Close the connection; returns the ids of its requests, for the caller to abort."""
        if why:
            facts = {"why": why, "open": len(peer.requests), "lost": sorted(peer.requests)[:_MAX_LOGGED]}
            logger.warning("dropped a peer of the engine socket", extra=facts)
        self._peers.discard(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        return peer.requests
