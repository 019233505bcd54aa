"""Leader election with a coordination.k8s.io Lease: one replica leads, the others wait.

A holder whose Lease another replica took must end its process. One that cannot reach the API server stops
writing after the renew deadline (the fence), and continues if the Lease turns out to be still its own. Times
are of the monotonic clock, so that a changed wall clock or a paused process decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from quire_operator.cluster import ClusterError, ConflictError, NotFoundError
from quire_operator.errors import QuireOperatorError

logger = logging.getLogger(__name__)

Lease = dict[str, Any]


class NotLeadingError(QuireOperatorError):
    """This process may not write: it does not hold the Lease, or cannot know that it does."""


class LeadershipLostError(QuireOperatorError):
    """Another replica holds the Lease: the process must end at once."""


class LeaseApi(Protocol):
    """Conditional reads and writes of one Lease."""

    async def read(self) -> Lease | None: ...

    async def create(self, spec: dict[str, Any]) -> Lease: ...

    async def replace(self, lease: Lease, spec: dict[str, Any]) -> Lease: ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds, as controller-runtime has them."""

    duration: float = 15
    renew_deadline: float = 10
    retry: float = 2

    @property
    def request(self) -> float:
        """A request may not outlast half of the time in which the Lease must be renewed."""
        return self.renew_deadline * 0.4


class Election:
    """One replica's view of the Lease."""

    def __init__(
        self,
        api: LeaseApi,
        *,
        identity: str,
        terms: Terms,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._identity = identity
        self._terms = terms
        self._clock = clock
        self._sleep = sleep
        self._held: Lease | None = None
        self._renewed_at = float("-inf")
        self._seen_version = ""
        self._seen_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Whether this process may write now."""
        return self._held is not None and self._clock() - self._renewed_at < self._terms.renew_deadline

    def fence(self) -> None:
        """Raise NotLeadingError unless this process leads: asked before each write."""
        if not self.leads:
            raise NotLeadingError("the Lease is not held, or was not renewed in time")

    async def acquire(self) -> None:
        """Return once this replica holds the Lease."""
        while True:
            try:
                if await self._try_acquire():
                    logger.info("leading as %s", self._identity)
                    return
            except ClusterError as error:
                logger.warning("cannot read or take the Lease: %s", error)
            # A standby replica retries twice as often, so that a released Lease is taken within about a
            # second.
            await self._sleep(self._terms.retry / 2 * random.uniform(0.8, 1.0))

    async def hold(self) -> None:
        """Renew until another replica holds the Lease: raises LeadershipLostError then."""
        while True:
            await self._sleep(self._terms.retry)
            try:
                await self._renew()
            except ClusterError as error:
                age = self._clock() - self._renewed_at
                logger.warning("the Lease was not renewed for %.0f s: %s", age, error)

    async def release(self) -> None:
        """Release the Lease, so that a standby replica need not wait for it to expire."""
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            try:
                await self._api.replace(held, self._spec(held, holder="", seconds=1))
            except ConflictError:  # a renewal that was under way when it was cancelled
                lease = await self._api.read()
                if lease is not None and _spec(lease).get("holderIdentity") == self._identity:
                    await self._api.replace(lease, self._spec(lease, holder="", seconds=1))
        except ClusterError as error:
            logger.warning("the Lease was not released and will expire: %s", error)

    async def _try_acquire(self) -> bool:
        requested_at = self._clock()
        lease = await self._api.read()
        try:
            if lease is None:
                held = await self._api.create(self._spec(None, holder=self._identity))
            elif self._is_free(lease):
                held = await self._api.replace(lease, self._spec(lease, holder=self._identity))
            else:
                return False
        except ConflictError:
            return False
        self._held, self._renewed_at = held, requested_at
        return True

    def _is_free(self, lease: Lease) -> bool:
        """Whether it has no holder, was held by an earlier process of this pod, or was not renewed for its
        duration.
        """
        holder = _spec(lease).get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        version = str(lease["metadata"].get("resourceVersion"))
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, self._clock()
        duration = float(_spec(lease).get("leaseDurationSeconds") or self._terms.duration)
        return self._clock() - self._seen_at >= duration

    async def _renew(self) -> None:
        assert self._held is not None
        requested_at = self._clock()
        try:
            self._held = await self._api.replace(self._held, self._spec(self._held, holder=self._identity))
        except (ConflictError, NotFoundError):
            # Written or deleted by another client, or by a request of ours whose answer was lost.
            lease = await self._api.read()
            if lease is None or _spec(lease).get("holderIdentity") != self._identity:
                self._held = None
                raise LeadershipLostError("another replica holds the Lease") from None
            self._held = lease
            return  # not counted as renewed: the next attempt writes it
        self._renewed_at = requested_at

    def _spec(self, lease: Lease | None, *, holder: str, seconds: float | None = None) -> dict[str, Any]:
        old = _spec(lease) if lease is not None else {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_new = old.get("holderIdentity") != holder
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(self._terms.duration if seconds is None else seconds),
            "acquireTime": now if is_new else old.get("acquireTime") or now,
            "renewTime": now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (1 if is_new and holder else 0),
        }


def _spec(lease: Lease) -> dict[str, Any]:
    spec = lease.get("spec")
    return spec if isinstance(spec, dict) else {}
