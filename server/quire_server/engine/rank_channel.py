"""A connection between rank 0 and another rank: whole frames over a unix socket, each wait with a deadline.

A frame is a 4-byte length and a body. The first frames are a handshake, in which rank 0 learns who connects
and the other rank learns how to join, and gets the descriptor of what they share; after it there are steps
one way and echoes the other (``step_codec``). The socket is in the run directory, which only this server's
user can enter.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quire_server.engine.codec import CodecError, decoder, encode, unpack

SOCKET_NAME = "ranks.sock"
_LENGTH = struct.Struct(">I")
_READ_SIZE = 1 << 18
_RETRY_SECONDS = 0.05
_MAX_HANDSHAKE_BYTES = 1 << 16
_SLICE_SECONDS = 0.2
_BUSY_POLL_SECONDS = 1e-3
_SLICE = struct.pack("ll", 0, round(_SLICE_SECONDS * 1e6))  # struct timeval


class ChannelClosedError(Exception):
    """The other side has closed the connection, or its process has ended."""


class ChannelTimeoutError(Exception):
    """The other side sent nothing in time."""


@dataclass(frozen=True)
class Identity:
    """What all ranks of a group have in common. ``revision``: of the pod's template, "" where all ranks are
    in one pod; the others are digests. Of the image, the code that it runs is what counts.
    """

    protocol: int
    revision: str
    image: str
    model: str
    arguments: str

    def differences(self, other: Identity) -> tuple[str, ...]:
        """The names of the fields that differ."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True)
class Hello:
    """A rank introduces itself. ``incarnation``: of the group to which it belongs, "" for a rank that starts
    and belongs to none. Its fields stay as they are, so that a rank of another version is understood and
    refused as one.
    """

    rank: int
    incarnation: str
    identity: Identity


@dataclass(frozen=True)
class Welcome:
    """Rank 0 has taken the rank in. ``communicator``: how ranks exchange parts. ``incarnation``: the name of
    the group, drawn by rank 0 when it started.
    """

    communicator: str
    incarnation: str


@dataclass(frozen=True)
class Refused:
    """Rank 0 does not take the other side in. ``reason``: one word, as in the termination log."""

    reason: str
    message: str


@dataclass(frozen=True)
class Loading:
    """The rank loads its weights, and made progress."""

    loaded_bytes: int


@dataclass(frozen=True)
class Loaded:
    """The rank has loaded its weights. ``num_blocks``: how many KV blocks it has room for. ``host``: name of
    the machine, which in Kubernetes is that of the pod.
    """

    num_blocks: int
    host: str


@dataclass(frozen=True)
class Agreed:
    """Rank 0 sends the number of KV blocks, the same on every rank."""

    num_blocks: int


@dataclass(frozen=True)
class Prepared:
    """The rank waits for steps. ``can_replay``: it has a recorded decode."""

    can_replay: bool


Handshake = Hello | Welcome | Refused | Loading | Loaded | Agreed | Prepared
T = TypeVar("T")
_KINDS: tuple[type[Handshake], ...] = (Hello, Welcome, Refused, Loading, Loaded, Agreed, Prepared)
_DECODERS: tuple[Callable[[Any], Handshake], ...] = tuple(decoder(kind) for kind in _KINDS)


class Patience:
    """Seconds that may be waited in all. A pause of this process, during which the other side did not run
    either, uses up no more than a moment of them.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._began_at = 0.0

    def begin(self) -> None:
        """A wait begins, of one slice at most."""
        self._began_at = time.monotonic()

    def end(self) -> None:
        """That wait is over."""
        self._left -= min(time.monotonic() - self._began_at, _SLICE_SECONDS)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._left < 1e-6


class Channel:
    """One connection; sends and receives block. A receive polls for a moment before it sleeps. The kernel
    ends each wait after a slice of time: a timeout of Python's would be two more system calls for each.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _SLICE)
        self._connection = connection
        self._buffer = bytearray()

    @classmethod
    def connect(cls, run_dir: Path, timeout: float) -> Channel:
        """Connect to rank 0, which may not listen yet."""
        deadline = time.monotonic() + timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(run_dir / SOCKET_NAME))
                return cls(connection)
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > deadline:
                    raise ChannelTimeoutError from None
                time.sleep(_RETRY_SECONDS)  # no event says when rank 0 listens; this is once, at the start

    def send(self, body: bytes, timeout: float | None = None) -> None:
        """Send a frame."""
        self._send(_LENGTH.pack(len(body)) + body, timeout)

    def _send(self, frame: bytes, timeout: float | None) -> None:
        patience = None if timeout is None else Patience(timeout)
        sent = self._wait(partial(self._connection.send, frame), patience)
        while sent < len(frame):
            sent += self._wait(partial(self._connection.send, memoryview(frame)[sent:]), patience)

    def receive(self, max_bytes: int, timeout: float | Patience | None = None) -> bytes:
        """Wait for the next frame. Raises CodecError for one that is longer than it may be."""
        patience = Patience(timeout) if isinstance(timeout, int | float) else timeout
        while (body := self._take(max_bytes)) is None:
            self._fill(patience)
        return body

    def _fill(self, patience: Patience | None) -> None:
        """Wait until a part of a frame has come."""
        data = self._wait(self._busy_poll, patience)
        data = data or self._wait(partial(self._connection.recv, _READ_SIZE), patience)
        if not data:
            raise ChannelClosedError("the connection was closed")
        self._buffer += data

    def _busy_poll(self) -> bytes:
        """What comes within a moment, b"" where nothing does. In a run of steps the next frame is that near,
        and the kernel takes longer to wake a process that sleeps than two ranks to exchange a small step.
        """
        until = time.perf_counter() + _BUSY_POLL_SECONDS
        while time.perf_counter() < until:
            try:
                return self._connection.recv(_READ_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # where there are more ranks than cores, another one continues
        return b""

    def _wait(self, call: Callable[[], T], patience: Patience | None) -> T:
        while True:
            if patience is not None:
                patience.begin()
            try:
                return call()
            except BlockingIOError:
                pass  # the slice is over
            except OSError as error:
                raise ChannelClosedError(str(error)) from None
            finally:
                if patience is not None:
                    patience.end()
            if patience is not None and patience.is_over:
                raise ChannelTimeoutError("nothing came, or was read, in time")

    def _take(self, max_bytes: int) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > max_bytes:
            raise CodecError(f"a frame of {length} bytes is longer than {max_bytes}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body

    def say(self, message: Handshake, timeout: float | None = None, *, descriptor: int | None = None) -> None:
        """Send a message of the handshake, and a descriptor with it."""
        body = encode((_KINDS.index(type(message)), message))
        frame = _LENGTH.pack(len(body)) + body
        if descriptor is None:
            self._send(frame, timeout)
        else:  # so small a frame is sent whole or not at all
            patience = None if timeout is None else Patience(timeout)
            self._wait(partial(socket.send_fds, self._connection, [frame], [descriptor]), patience)

    def hear(self, timeout: float) -> Handshake:
        """Wait for a message of the handshake."""
        return _decode(self.receive(_MAX_HANDSHAKE_BYTES, timeout))

    def poll(self) -> Handshake | None:
        """Of a connection from which something can be read: the next message, None where not all of it has
        come.
        """
        self._fill(Patience(0))
        body = self._take(_MAX_HANDSHAKE_BYTES)
        return None if body is None else _decode(body)

    def hear_with_descriptor(self, timeout: float) -> tuple[Handshake, int | None]:
        """Wait for a message, and the descriptor that was sent with it, which the caller closes. Of what was
        sent before, everything has to be heard.
        """

        read = partial(socket.recv_fds, self._connection, _READ_SIZE, 1, socket.MSG_CMSG_CLOEXEC)
        data, descriptors, *_ = self._wait(read, Patience(timeout))
        self._buffer += data
        return self.hear(timeout), descriptors[0] if descriptors else None

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _decode(body: bytes) -> Handshake:
    value = unpack(body)
    if type(value) is not list or len(value) != 2 or type(value[0]) is not int:
        raise CodecError("expected [tag, fields]")
    if not 0 <= value[0] < len(_KINDS):
        raise CodecError(f"unknown message {value[0]}")
    return _DECODERS[value[0]](value[1])


def listen(run_dir: Path, backlog: int) -> socket.socket:
    """The socket to which the other ranks connect. Renamed after listen(), so that who finds it can
    connect.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = run_dir / (SOCKET_NAME + ".new")
    listener.bind(str(temporary))
    temporary.chmod(0o600)
    listener.listen(backlog)
    temporary.rename(run_dir / SOCKET_NAME)
    return listener


def stop_listening(listener: socket.socket, run_dir: Path) -> None:
    """Take no more connections: a group never takes in a rank later."""
    listener.close()
    (run_dir / SOCKET_NAME).unlink()
