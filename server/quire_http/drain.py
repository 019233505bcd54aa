"""Graceful drain: its state, and the wait for its end.

SIGTERM begins it; a second SIGTERM, or the end of its time, cuts what is left. Connections count as clients:
an idle one may send a request in the moment in which it is closed, so it is closed only after being idle for
longer than common clients keep an idle connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

# openai-python (httpx) uses an idle connection again within 5 s, never later.
LINGER_SECONDS = 6.0
# How long a Service may still send new connections to a pod that has left it.
ENDPOINT_REMOVAL_SECONDS = 5.0
RETRY_AFTER_SECONDS = 1
_POLL_SECONDS = 0.05
_CUT_SECONDS = 1.0


@dataclass(frozen=True)
class DrainLimits:
    """Seconds that the drain may take, and that the pod had left its Service before it began."""

    timeout: float
    pre_stop: float


class ClientConnection(Protocol):
    """The state of an open connection that a drain looks at."""

    opened_at: float
    idle_since: float | None


class Cut(asyncio.Event):
    """When what still runs ends: in a process, or for a connection that is lost. ``callbacks`` are called
    then: to wait takes a task, and each request would need one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: set[Callable[[], None]] = set()

    def set(self) -> None:
        """End it."""
        super().set()
        for callback in tuple(self.callbacks):
            callback()


class Drain:
    """The drain of one process."""

    def __init__(self, limits: DrainLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._begun_at: float | None = None
        self._begun = asyncio.Event()
        self.cut = Cut()
        self.num_requests = 0

    @property
    def begun(self) -> bool:
        """True from the first SIGTERM on."""
        return self._begun_at is not None

    def begin(self) -> None:
        """SIGTERM: begin, or (asked again) cut what is left."""
        if self._begun_at is None:
            self._begun_at = self._clock()
            self._begun.set()
        else:
            self.cut.set()

    def refuses(self, opened_at: float) -> bool:
        """Whether a request on this connection is sent elsewhere: connections from before are served, later
        ones only as long as the Service may not know yet."""
        if self._begun_at is None or opened_at <= self._begun_at:
            return False
        return self._clock() - self._begun_at + self._limits.pre_stop >= ENDPOINT_REMOVAL_SECONDS

    async def wait_for_begin(self) -> None:
        """Returns at the first SIGTERM."""
        await self._begun.wait()

    async def wait_for_end(
        self,
        connections: Callable[[], Iterable[ClientConnection]],
        serves_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Returns when no client is left, at the latest when the time is over; then the rest has been cut.
        ``serves_others``: whether this server still does what others have asked it for outside of HTTP.
        """
        assert self._begun_at is not None
        deadline = self._begun_at + self._limits.timeout
        while not self.cut.is_set() and self._clock() < deadline:
            has_clients = self.num_requests or any(self._is_client(one) for one in connections())
            if not has_clients and not serves_others():
                return
            await asyncio.sleep(_POLL_SECONDS)
        if self.num_requests:
            logger.warning("the drain's time is over", extra={"cancelled_requests": self.num_requests})
        self.cut.set()
        # A client that does not read its last event, or sends its body slowly, is not waited for.
        while self.num_requests and self._clock() < deadline + _CUT_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)

    def _is_client(self, connection: ClientConnection) -> bool:
        idle_since = connection.idle_since
        return idle_since is None or self._clock() - idle_since < LINGER_SECONDS
