"""Writes the Leases by which the operator learns that requests wait for models without pods.

At once where a model is asked for, and again while it is. The Lease goes when no request waits here; another
gateway where some wait writes it again within ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import aiohttp

from quire_gateway import demand
from quire_gateway.activator import Activator
from quire_gateway.informer import LEASES
from quire_gateway.kube_api import Connection, KubeApi, KubeError, MissingError
from quire_gateway.routing_table import Place

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
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
            wanted = set(self._activator.demands())
            if not (wanted or self._renewed_at):
                continue
            try:
                async with self._api.connect() as connection:
                    await self._write(connection, wanted)
            except (aiohttp.ClientError, KubeError, TimeoutError, OSError) as error:
                logger.warning("cannot ask for pods of models that have none: %r", error)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _write(self, connection: Connection, wanted: set[Place]) -> None:
        now = time.monotonic()
        for place in wanted:
            if now - self._renewed_at.get(place, float("-inf")) >= demand.RENEW_SECONDS:
                path = f"{self._path}/{demand.lease_name(place)}?fieldManager=quire-gateway&force=true"
                body = demand.lease(place, demand.timestamp())
                await connection.send("PATCH", path, body, _APPLY_PATCH)
                self._renewed_at[place] = now
        for place in self._renewed_at.keys() - wanted:
            with contextlib.suppress(MissingError):
                await connection.send("DELETE", f"{self._path}/{demand.lease_name(place)}")
            del self._renewed_at[place]
