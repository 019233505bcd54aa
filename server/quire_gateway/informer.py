"""Keeps objects as the API server has them: one list, then a watch that goes on where it ended.

While the API server is away they stay as they were: requests go on, and replicas that fail meanwhile are
found by their failures. All is listed again every five minutes, so that a lost event is made up for. A kind
that the API server does not have, because its CRD is not installed, has no objects.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire_gateway.gateway_leases import LABEL_ROLE, ROLE
from quire_gateway.kube_api import FAILURES, Connection, GoneError, KubeApi, MissingError
from quire_gateway.replicas import LABEL_MODEL

logger = logging.getLogger(__name__)

GROUP_VERSION = "serving.quire.dev/v1alpha1"
RESYNC_SECONDS = 300.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_MISSING_PAUSE_SECONDS = 30.0  # of a kind that the API server does not have


@dataclass(frozen=True, slots=True)
class Kind:
    """What is watched: a kind of objects, or those of them that a selector of labels chooses."""

    group_version: str
    plural: str
    selector: str = ""
    is_custom: bool = False  # so that the API server may not have it

    def path(self, namespace: str) -> str:
        """Of the collection."""
        return f"/apis/{self.group_version}/namespaces/{namespace}/{self.plural}"


ENDPOINT_SLICES = Kind("discovery.k8s.io/v1", "endpointslices", LABEL_MODEL)
LEASES = Kind("coordination.k8s.io/v1", "leases", f"{LABEL_ROLE}={ROLE}")
LLM_ROUTES = Kind(GROUP_VERSION, "llmroutes", is_custom=True)
LLM_CLIENTS = Kind(GROUP_VERSION, "llmclients", is_custom=True)
LLM_EXTERNAL_BACKENDS = Kind(GROUP_VERSION, "llmexternalbackends", is_custom=True)
LLM_DEPLOYMENTS = Kind(GROUP_VERSION, "llmdeployments", is_custom=True)


class Store(Protocol):
    """Where the objects go."""

    def replace(self, bodies: Iterable[Mapping[str, Any]], namespace: str) -> None:
        """These are all objects of a namespace."""

    def put(self, body: Mapping[str, Any]) -> None:
        """An object is new or has changed."""

    def remove(self, body: Mapping[str, Any]) -> None:
        """An object is deleted."""


class Informer:
    """The watch of one kind in one namespace."""

    def __init__(
        self, api: KubeApi, kind: Kind, store: Store, namespace: str, resync: float = RESYNC_SECONDS
    ) -> None:
        self.kind = kind
        self._api = api
        self._store = store
        self._namespace = namespace
        self._resync = resync
        self._has_listed = asyncio.Event()

    @property
    def has_listed(self) -> bool:
        """Whether the objects were listed once."""
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
                logger.info("the watch of %s in %s begins anew", self.kind.plural, self._namespace)
            except FAILURES as error:
                if self.kind.is_custom and isinstance(error, MissingError):
                    self._has_listed.set()  # what was there stays: its deletion would have been an event
                    pause = _MISSING_PAUSE_SECONDS
                else:
                    logger.warning("cannot watch %s in %s: %r", self.kind.plural, self._namespace, error)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                continue  # it is time to list again
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self, connection: Connection) -> str:
        bodies, version = await connection.list(self.kind.path(self._namespace), self.kind.selector)
        self._store.replace(bodies, self._namespace)
        self._has_listed.set()
        return version

    async def _watch(self, connection: Connection, version: str) -> None:
        """Apply the events from a version on, until it is time to list again."""
        end = time.monotonic() + self._resync
        path, selector = self.kind.path(self._namespace), self.kind.selector
        while time.monotonic() < end:
            async for event in connection.watch(path, selector, version):
                body = event["object"]
                version = str(body["metadata"]["resourceVersion"])
                if event["type"] == "DELETED":
                    self._store.remove(body)
                elif event["type"] != "BOOKMARK":
                    self._store.put(body)
