"""Writes the Leases by which the operator learns that requests wait for models without pods.

At once where a model is asked for, and again while it is. The Lease goes when no request waits here; another
gateway where some wait writes it again within ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterable

from quire_gateway import demand
from quire_gateway.activator import Activator
from quire_gateway.informer import LEASES
from quire_gateway.kube_api import FAILURES, Connection, KubeApi, MissingError
from quire_gateway.routing_table import Place

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
_APPLY_PATCH = "application/apply-patch+yaml"


class DemandWriter:
    """That of one gateway. ``namespace``: of the Leases, the gateway's own."""

    def __init__(self, api: KubeApi, namespace: str, activator: Activator) -> None:
        self._api = api
        self._path = LEASES.path(namespace)
        self._activator = activator
        self._renewed_at: dict[Place, float] = {}

    async def run(self) -> None:
        """Until cancelled. Where the API server is away it is tried again every second."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._activator.demanded.wait(), _LOOK_SECONDS)
            self._activator.demanded.clear()
            wanted, now = set(self._activator.demands()), time.monotonic()
            due = [
                one for one in wanted if now - self._renewed_at.get(one, -math.inf) >= demand.RENEW_SECONDS
            ]
            done = self._renewed_at.keys() - wanted
            if due or done:
                await self._write(due, done)

    async def close(self) -> None:
        """This gateway ends, and asks for nothing any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._write((), set(self._renewed_at))

    async def _write(self, due: Iterable[Place], done: Iterable[Place]) -> None:
        """Each for itself: one that is refused keeps no other waiting."""
        try:
            async with self._api.connect() as connection:
                for place in due:
                    await self._renew(connection, place)
                for place in list(done):
                    await self._delete(connection, place)
        except OSError as error:  # of the credentials
            logger.warning("cannot ask for pods of models that have none: %r", error)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _renew(self, connection: Connection, place: Place) -> None:
        path = f"{self._path}/{demand.lease_name(place)}?fieldManager=quire-gateway&force=true"
        try:
            await connection.send("PATCH", path, demand.lease(place, demand.timestamp()), _APPLY_PATCH)
            self._renewed_at[place] = time.monotonic()
        except FAILURES as error:
            logger.warning("cannot ask for a pod of %s/%s: %r", *place, error)

    async def _delete(self, connection: Connection, place: Place) -> None:
        try:
            await connection.send("DELETE", f"{self._path}/{demand.lease_name(place)}")
        except MissingError:  # another gateway was first
            pass
        except FAILURES as error:
            logger.warning("cannot delete the Lease for %s/%s: %r", *place, error)
            return
        del self._renewed_at[place]
