"""The table of ready serving pods in all namespaces, kept up to date by one watch.

The scraper reads it for the pods to scrape, the server for the pods that a sum must contain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire_metrics_adapter.errors import ApiError, GoneError
from quire_metrics_adapter.kube_api import Connection
from quire_metrics_adapter.owners import Owners, deployment_of
from quire_operator import names

logger = logging.getLogger(__name__)

PATH = "/api/v1/pods"
SELECTOR = f"{names.LABEL_NAME},{names.LABEL_ROLE} in ({names.ROLE_LEADER},{names.ROLE_PREFILL})"
# Without a watch for so long, the table is not trusted any more.
LOST_SECONDS = 15.0
# Owners of pods may change without an event of the pod: a Deployment that is created again adopts its
# ReplicaSets.
RELIST_SECONDS = 300.0
_PAGE = "500"
_ENDED = ("Succeeded", "Failed")  # an evicted pod never changes again
_RETRY_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Pod:
    """A serving pod that is ready."""

    uid: str
    namespace: str
    deployment: str
    address: str
    role: str = names.ROLE_LEADER


class PodTable:
    """The ready pods by uid, and which LLMDeployments have any pods. `changed` is set whenever a pod may be
    new.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pods: dict[str, Pod] = {}
        self._by_deployment: dict[tuple[str, str, str], set[str]] = {}  # and by role
        self._existing: dict[str, tuple[str, str]] = {}  # uid -> LLMDeployment, ready or not
        self._seen_at = float("-inf")
        self._connected = False
        self.changed = asyncio.Event()

    @property
    def known(self) -> bool:
        """Whether the table is up to date."""
        return self._connected or self._clock() - self._seen_at <= LOST_SECONDS

    def all(self) -> list[Pod]:
        """Every ready pod."""
        return list(self._pods.values())

    def of(self, namespace: str, deployment: str, role: str = names.ROLE_LEADER) -> frozenset[str]:
        """The uids of the ready pods of one LLMDeployment in a role."""
        return frozenset(self._by_deployment.get((namespace, deployment, role), ()))

    def has_any(self, namespace: str, deployment: str) -> bool:
        """Whether one LLMDeployment has pods: ready, loading or draining."""
        return (namespace, deployment) in self._existing.values()

    def connected(self, is_so: bool) -> None:
        """The watch is connected, or was until now."""
        if self._connected and not is_so:
            self._seen_at = self._clock()
        self._connected = is_so

    def replace(self, bodies: list[Mapping[str, Any]]) -> None:
        """Replace the table by a complete list."""
        self._pods.clear()
        self._by_deployment.clear()
        self._existing.clear()
        for body in bodies:
            self.put(body)

    def put(self, body: Mapping[str, Any]) -> None:
        """Add or update a pod."""
        pod = read(body)
        if pod is None or self._pods.get(pod.uid) != pod:
            self.remove(body)
        if (body.get("status") or {}).get("phase") not in _ENDED:
            self._existing[str(body["metadata"]["uid"])] = deployment_of(body)
        if pod is not None and pod.uid not in self._pods:
            self._pods[pod.uid] = pod
            self._by_deployment.setdefault(_place(pod), set()).add(pod.uid)
            self.changed.set()

    def remove(self, body: Mapping[str, Any]) -> None:
        """Remove a deleted pod."""
        self._existing.pop(str(body["metadata"]["uid"]), None)
        pod = self._pods.pop(str(body["metadata"]["uid"]), None)
        if pod is not None:
            place = _place(pod)
            self._by_deployment[place].discard(pod.uid)
            if not self._by_deployment[place]:
                del self._by_deployment[place]


def _place(pod: Pod) -> tuple[str, str, str]:
    return pod.namespace, pod.deployment, pod.role


def read(body: Mapping[str, Any]) -> Pod | None:
    """The pod if it is ready: one that is being deleted gets no requests any more."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    namespace, deployment = deployment_of(body)
    address = str(status.get("podIP") or "")
    is_ready = conditions.get("Ready") == "True" and "deletionTimestamp" not in metadata
    if not (is_ready and deployment and address):
        return None
    role = str((metadata.get("labels") or {}).get(names.LABEL_ROLE) or names.ROLE_LEADER)
    return Pod(str(metadata["uid"]), namespace, deployment, address, role)


async def watch(connection: Connection, owners: Owners, table: PodTable) -> None:
    """Keep `table` up to date until cancelled, whatever the API server does. Pods of no LLMDeployment are
    left out, whatever their labels say.
    """
    version, listed_at = "", float("-inf")
    while True:
        try:
            if not version or time.monotonic() - listed_at > RELIST_SECONDS:
                version, listed_at = await _list(connection, owners, table), time.monotonic()
            table.connected(True)
            query = {"labelSelector": SELECTOR, "resourceVersion": version}
            async for event in connection.watch(PATH, query):
                body = event["object"]
                version = str(body["metadata"]["resourceVersion"])
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED" or await owners.owner(body) is None:
                    table.remove(body)
                else:
                    table.put(body)
            await asyncio.sleep(_PAUSE_SECONDS)  # it ended as expected, and is resumed
        except GoneError:
            version = ""
        except ApiError as error:
            logger.warning("cannot watch pods: %s", error)
            table.connected(False)
            version = ""
            await asyncio.sleep(_RETRY_SECONDS)


async def _list(connection: Connection, owners: Owners, table: PodTable) -> str:
    """Fill the table; returns the resource version of the list."""
    await owners.refresh()
    bodies: list[Mapping[str, Any]] = []
    query = {"labelSelector": SELECTOR, "limit": _PAGE}
    while True:
        answer = await connection.request("GET", PATH, query=query)
        bodies += answer.get("items") or []
        query["continue"] = str(answer["metadata"].get("continue") or "")
        if not query["continue"]:
            table.replace([body for body in bodies if await owners.owner(body) is not None])
            return str(answer["metadata"]["resourceVersion"])
