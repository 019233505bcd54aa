"""Connections with many bytes to parse take turns, so that the event loop never parses for long.

A packet of a quarter of a megabyte may hold ten thousand headers, chunks or requests, each of them a call of
Python. What is read only to be dropped, the rest of a refused body, waits until all else is parsed, and waits
unread: else the connections of one client could fill the memory with it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

_TURN_SECONDS = 0.001  # of one round of the event loop, for all connections together
_DROPS_PER_ROUND = 8  # reads of what is dropped, in one round of the event loop


class Parsing(Protocol):
    """A connection with bytes that are not parsed."""

    def parse_some(self) -> bool:
        """Parse for less than a millisecond; whether bytes are left."""

    def read_more(self) -> None:
        """Read what comes next."""


class ParserTurns:
    """The connections of one event loop that have bytes left, or have bytes to drop that are not read."""

    def __init__(self) -> None:
        self._waiting: deque[Parsing] = deque()
        self._dropping: deque[Parsing] = deque()
        self._is_scheduled = False

    def add(self, connection: Parsing, loop: asyncio.AbstractEventLoop) -> None:
        """Let `connection` parse in its turn, until none is left. Call it once for that."""
        self._waiting.append(connection)
        self._schedule(loop)

    def add_dropping(self, connection: Parsing, loop: asyncio.AbstractEventLoop) -> None:
        """Let `connection` read in its turn what will be dropped."""
        self._dropping.append(connection)
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if (self._waiting or self._dropping) and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        end = time.monotonic() + _TURN_SECONDS
        while self._waiting and time.monotonic() < end:
            connection = self._waiting.popleft()
            if connection.parse_some():
                self._waiting.append(connection)
        for _ in range(0 if self._waiting else min(len(self._dropping), _DROPS_PER_ROUND)):
            self._dropping.popleft().read_more()
        self._schedule(loop)
