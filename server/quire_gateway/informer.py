"""Keeps a table of EndpointSlices as the API server has it: a list, then a watch that goes on from there.

While the API server is away the table stays as it was: requests go on, and replicas that fail meanwhile are
found by their failures. All is listed again every five minutes, so that a lost event is made up for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import aiohttp

from quire_gateway.kube_api import Connection, GoneError, KubeApi, KubeError
from quire_gateway.replicas import LABEL_MODEL

logger = logging.getLogger(__name__)

RESYNC_SECONDS = 300.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0


class Table(Protocol):
    """What is kept."""

    def replace(self, slices: Iterable[Mapping[str, Any]], namespace: str) -> None:
        """These are all slices of a namespace."""

    def put(self, body: Mapping[str, Any]) -> None:
        """A slice is new or has changed."""

    def remove(self, body: Mapping[str, Any]) -> None:
        """A slice is deleted."""


class Informer:
    """The watch of the EndpointSlices of one namespace that a selector of labels has."""

    def __init__(
        self,
        api: KubeApi,
        table: Table,
        namespace: str,
        resync: float = RESYNC_SECONDS,
        selector: str = LABEL_MODEL,
    ) -> None:
        self._api = api
        self._table = table
        self._namespace = namespace
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._resync = resync
        self._selector = selector
        self._has_listed = asyncio.Event()

    @property
    def has_listed(self) -> bool:
        """Whether the table was filled once."""
        return self._has_listed.is_set()

    async def run(self) -> None:
        """Until cancelled, whatever the API server does."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._api.connect() as connection:
                    version = await self._list(connection)
                    pause = _FIRST_PAUSE_SECONDS
                    await self._watch(connection, version)
            except GoneError:
                logger.info("the watch of %s begins anew", self._namespace)
            except (aiohttp.ClientError, KubeError, TimeoutError, OSError) as error:
                logger.warning("cannot watch the EndpointSlices of %s: %r", self._namespace, error)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                continue  # it is time to list again
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self, connection: Connection) -> str:
        slices, version = await connection.list(self._path, self._selector)
        self._table.replace(slices, self._namespace)
        self._has_listed.set()
        return version

    async def _watch(self, connection: Connection, version: str) -> None:
        """Apply the events from a version on, until it is time to list again."""
        end = time.monotonic() + self._resync
        while time.monotonic() < end:
            async for event in connection.watch(self._path, self._selector, version):
                body = event["object"]
                version = str(body["metadata"]["resourceVersion"])
                if event["type"] == "DELETED":
                    self._table.remove(body)
                elif event["type"] != "BOOKMARK":
                    self._table.put(body)
