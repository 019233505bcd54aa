"""Which connections rank 0 takes as the other ranks of its group: the only ones that say Hello as it would.

Every process that reaches the socket can connect. What is no Hello, comes late, or is of another group is
refused and closed, and rank 0 goes on waiting for its ranks. A rank of another revision gets the reason, ends
by it, and its supervisor reports it. ``refusal`` is a pure function.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from typing import Any, Protocol

from quire_server.engine.codec import CodecError
from quire_server.engine.rank_channel import (
    Channel,
    ChannelClosedError,
    ChannelTimeoutError,
    Handshake,
    Hello,
    Identity,
    Refused,
)
from quire_server.errors import RankLostError
from quire_server.peer_auth import PAUSE_SECONDS

logger = logging.getLogger(__name__)

MIXED_REVISION = "MixedRevision"
_HELLO_SECONDS = 10.0  # for a rank to say Hello after it has connected
_MAX_STRANGERS = 64  # connections without a Hello; for one more, the oldest is closed
_TICK_SECONDS = 0.5


def draw_incarnation() -> str:
    """The name of a new group, unlike that of any earlier one."""
    return secrets.token_hex(8)


def refusal(hello: Handshake, own: Identity, size: int, incarnation: str, taken: set[int]) -> Refused | None:
    """Why not to take in who says this, or None. ``taken``: the ranks that have joined."""
    if not isinstance(hello, Hello):
        return Refused("NoHello", f"a {type(hello).__name__} is no Hello")
    if different := hello.identity.differences(own):
        return Refused(MIXED_REVISION, f"rank {hello.rank} has another {' and '.join(different)} than rank 0")
    if hello.incarnation not in ("", incarnation):
        return Refused("OldIncarnation", f"rank {hello.rank} belongs to group {hello.incarnation}")
    if not 0 < hello.rank < size or hello.rank in taken:
        return Refused("NoSuchRank", f"rank {hello.rank} is not missing in a group of {size}")
    return None


class Listener(Protocol):
    """A listening socket, or what gives only those of its connections that are let in (``RankListener``)."""

    def fileno(self) -> int:
        """The descriptor, readable when there is a connection."""
        ...

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        ...


class Admission:
    """Waits for the ranks of a new group."""

    def __init__(self, listener: Listener, own: Identity, size: int) -> None:
        self._listener, self._own, self._size = listener, own, size
        self.incarnation = draw_incarnation()
        self._joined: dict[int, Channel] = {}
        self._strangers: dict[Channel, float] = {}  # until when they may say Hello, the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._last_refusal = ""
        self._has_failed = False  # to accept: that is logged once

    def admit(self, timeout: float) -> dict[int, Channel]:
        """The channels of all other ranks. Raises RankLostError where one is missing for too long."""
        deadline = time.monotonic() + timeout
        with self._selector:
            while len(self._joined) < self._size - 1:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._strangers:
                        self._hear(key.data)
                    elif key.data in self._joined.values():
                        self._leave(key.data)
                now = time.monotonic()
                for channel in [each for each, until in self._strangers.items() if until <= now]:
                    self._refuse(channel, Refused("NoHello", "it said nothing"))
                if now >= deadline:
                    raise RankLostError(self._missing(timeout))
        for channel in self._strangers:
            channel.close()
        return self._joined

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # no descriptor is left: it waits in the kernel's queue
            if not self._has_failed:
                logger.warning(
                    "a connection cannot be accepted, it is tried again", extra={"why": str(error)}
                )
            self._has_failed = True
            time.sleep(PAUSE_SECONDS)  # no event says that there is one again
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)), Refused("NoHello", "others wait behind it"))
        channel = Channel(connection)
        self._strangers[channel] = time.monotonic() + _HELLO_SECONDS
        self._selector.register(connection, selectors.EVENT_READ, channel)

    def _hear(self, channel: Channel) -> None:
        try:
            hello = channel.poll()
        except (ChannelClosedError, CodecError) as error:
            self._refuse(channel, Refused("NoHello", str(error)))
            return
        if hello is None:
            return
        refused = refusal(hello, self._own, self._size, self.incarnation, set(self._joined))
        if refused is not None:
            self._refuse(channel, refused)
            return
        assert isinstance(hello, Hello)
        del self._strangers[channel]
        self._joined[hello.rank] = channel

    def _leave(self, channel: Channel) -> None:
        """A rank that has joined says nothing before its Welcome: the connection has ended. Its pod may
        restart, and join again.
        """
        rank = next(rank for rank, joined in self._joined.items() if joined is channel)
        logger.warning("a rank has gone before all had joined", extra={"rank": rank})
        del self._joined[rank]
        self._selector.unregister(channel)
        channel.close()

    def _refuse(self, channel: Channel, refused: Refused) -> None:
        """Say why, if the other side still listens, and close the connection."""
        facts = {"reason": refused.reason, "why": refused.message}
        logger.warning("a connection to the ranks' socket is refused", extra=facts)
        self._last_refusal = f" The last refusal: {refused.message}."
        del self._strangers[channel]
        self._selector.unregister(channel)
        with contextlib.suppress(ChannelClosedError, ChannelTimeoutError):  # it has gone, or does not read
            channel.say(refused, 0.1)
        channel.close()

    def _missing(self, timeout: float) -> str:
        ranks = ", ".join(str(rank) for rank in range(1, self._size) if rank not in self._joined)
        return (
            f"Rank {ranks} of {self._size} did not join within {timeout:g} s.{self._last_refusal} The pod "
            "restarts; if it comes back, raise startupTimeoutSeconds, or report it with the log."
        )
