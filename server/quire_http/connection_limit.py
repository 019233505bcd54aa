"""How many connections there may be, and which one makes room for a new one.

At the limit a connection that waits for its client is closed for each new one: first the one whose client has
kept it waiting longest in the middle of a request, or before its first, then the one that has been idle
longest. So clients that open connections and send nothing close their own, and keep no other client out.
Where all are being answered the new one is refused. Knows no HTTP.
"""

from __future__ import annotations

import enum
import resource
from collections.abc import Callable
from typing import Protocol

MAX_CONNECTIONS = 2048
_OTHER_FILES = 256  # that the process has open: libraries, sockets, children


class State(enum.IntEnum):  # whose members are cheap keys
    """What a connection waits for."""

    REQUEST = enum.auto()  # the rest of a request, or the first one
    IDLE = enum.auto()  # its client's next request
    ANSWER = enum.auto()  # us


class Closable(Protocol):
    """A connection."""

    def make_room(self) -> None:
        """Close it now."""


class ConnectionLimit:
    """The open connections of one server."""

    def __init__(self, limit: int = MAX_CONNECTIONS, on_refusal: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._on_refusal = on_refusal
        # Each has its connections in the order in which they came to that state.
        self._by_state: dict[State, dict[Closable, None]] = {state: {} for state in State}
        self._states: dict[Closable, State] = {}

    def admit(self, connection: Closable) -> bool:
        """Take a new connection, where need be instead of another one; False where it must be refused."""
        if len(self._states) >= self.limit:
            waiting = self._by_state[State.REQUEST] or self._by_state[State.IDLE]
            if not waiting:
                self._on_refusal()
                return False
            longest = next(iter(waiting))
            self.remove(longest)
            longest.make_room()
        self._enter(connection, State.REQUEST)
        return True

    def move(self, connection: Closable, state: State) -> None:
        """Note what a connection waits for now."""
        if self._states.get(connection, state) is not state:
            self.remove(connection)
            self._enter(connection, state)

    def remove(self, connection: Closable) -> None:
        """The connection is closed, or about to be."""
        state = self._states.pop(connection, None)
        if state is not None:
            del self._by_state[state][connection]

    def _enter(self, connection: Closable, state: State) -> None:
        self._states[connection] = state
        self._by_state[state][connection] = None


def raise_file_limit() -> int:
    """Allow this process as many open files as its connections take; returns the most connections that it can
    have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - _OTHER_FILES, soft // 2))
