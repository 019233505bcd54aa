"""Says by Events on the gateway's Lease that its limit store is lost, and that it is back.

One for each change, never for a request: an operator sees in `kubectl get events` since when limits are
shares, or clients are refused. Knows nothing of the store but whether it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from quire_gateway.informer import LEASES
from quire_gateway.kube_api import FAILURES, ConflictError, Connection, KubeApi
from quire_gateway.object_events import Event, document, path

logger = logging.getLogger(__name__)

LOST, BACK = "LimitStoreLost", "LimitStoreBack"
_MOST = 8  # that wait for the API server; older ones are dropped
_PAUSE_SECONDS = 5.0
_JSON = "application/json"


class StoreEvents:
    """Those of one gateway, by its namespace and name. ``denies``: what it does without its store."""

    def __init__(self, api: KubeApi, place: tuple[str, str], *, denies: bool) -> None:
        self._api = api
        self._namespace, self._name = place
        self._denies = denies
        self._is_lost = False
        self._waiting: deque[tuple[Event, str]] = deque(maxlen=_MOST)
        self._wake = asyncio.Event()

    def changed(self, *, is_up: bool) -> None:
        """The store is lost, or answers. That it answers at the start is no change."""
        if is_up is not self._is_lost:
            return
        self._is_lost = not is_up
        event = Event("Normal", BACK, "The limit store answers: limits are exact over all gateways.")
        if self._is_lost:
            then = "clients with limits are refused" if self._denies else "limits are shares of each gateway"
            event = Event("Warning", LOST, f"The limit store does not answer: {then}.")
        self._waiting.append((event, time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())))
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                async with self._api.connect() as connection:
                    await self._write(connection)
            except FAILURES as error:
                logger.warning("cannot create an Event of the limit store: %r", error)
                self._wake.set()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def close(self) -> None:
        """Nothing is to be written at the end."""

    async def _write(self, connection: Connection) -> None:
        leases, _ = await connection.list(LEASES.path(self._namespace), LEASES.selector)
        mine = (one for one in leases if one["metadata"]["name"] == self._name)
        metadata = {"name": self._name, "namespace": self._namespace}
        lease = next(mine, {"metadata": metadata})
        lease = {**lease, "apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        while self._waiting:
            event, now = self._waiting[0]
            try:
                body = document(event, lease, self._name, now, occurrence=now)
                await connection.send("POST", path(self._namespace), body, _JSON)
            except ConflictError:  # it was created by a request whose answer was lost
                pass
            self._waiting.popleft()
