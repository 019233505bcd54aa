"""Which pods belong to an LLMDeployment: by the uids of their owners, as the operator decides it.

A label says nothing, because everyone who may create a pod may label it, and the load of such a pod would
scale a stranger's replicas. A serving pod's controller is a ReplicaSet, whose controller is the Deployment of
the LLMDeployment's name, whose controller is the LLMDeployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_metrics_adapter.kube_api import Connection
from quire_operator import names

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE = "500"
_MOST_STRANGERS = 100_000

Body = Mapping[str, Any]
Owner = tuple[str, str]  # namespace and name of an LLMDeployment


class Owners:
    """The ReplicaSets of all LLMDeployments, by uid."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._replica_sets: dict[str, Owner] = {}
        self._strangers: set[str] = set()  # uids of ReplicaSets of no LLMDeployment, until the next refresh

    async def refresh(self) -> None:
        """List all ReplicaSets and Deployments that carry the label of an LLMDeployment. Raises ApiError."""
        sets = await self._list("replicasets", "", names.LABEL_NAME)
        deployments = await self._list("deployments", "", names.LABEL_NAME)
        self._replica_sets = _owned(sets, deployments)
        self._strangers.clear()

    async def owner(self, pod: Body) -> Owner | None:
        """The LLMDeployment that the pod belongs to. A ReplicaSet that is not known is read first. Raises
        ApiError.
        """
        namespace, name = deployment_of(pod)
        replica_set = _controller(pod, "ReplicaSet").get("uid", "")
        if not (name and replica_set) or replica_set in self._strangers:
            return None
        if replica_set not in self._replica_sets:
            selector = f"{names.LABEL_NAME}={name}"
            sets = await self._list("replicasets", namespace, selector)
            deployments = await self._list("deployments", namespace, selector)
            self._replica_sets |= _owned(sets, deployments)
            if replica_set not in self._replica_sets and len(self._strangers) < _MOST_STRANGERS:
                self._strangers.add(replica_set)
        found = self._replica_sets.get(replica_set)
        return found if found == (namespace, name) else None

    async def _list(self, plural: str, namespace: str, selector: str) -> list[Body]:
        path = f"/apis/apps/v1{f'/namespaces/{namespace}' if namespace else ''}/{plural}"
        query = {"labelSelector": selector, "limit": _PAGE}
        bodies: list[Body] = []
        while True:
            page = await self._connection.request("GET", path, query=query, accept=_METADATA_ONLY)
            bodies += page.get("items") or []
            query["continue"] = str(page["metadata"].get("continue") or "")
            if not query["continue"]:
                return bodies


def deployment_of(body: Body) -> Owner:
    """Namespace and name of the LLMDeployment that the label names; the name is empty without it."""
    metadata = body["metadata"]
    return str(metadata["namespace"]), str((metadata.get("labels") or {}).get(names.LABEL_NAME) or "")


def _owned(replica_sets: list[Body], deployments: list[Body]) -> dict[str, Owner]:
    """The ReplicaSets whose Deployment belongs to the LLMDeployment of the same name, by uid."""
    ours = {}
    for body in deployments:
        metadata = body["metadata"]
        if _controller(body, names.KIND).get("name") == metadata["name"]:
            ours[str(metadata["uid"])] = (str(metadata["namespace"]), str(metadata["name"]))
    found = {}
    for body in replica_sets:
        if owner := ours.get(_controller(body, "Deployment").get("uid", "")):
            found[str(body["metadata"]["uid"])] = owner
    return found


def _controller(body: Body, kind: str) -> Mapping[str, str]:
    """The owner reference of the object's controller, if that is of `kind`."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == kind:
            return {key: str(owner.get(key, "")) for key in ("uid", "name")}
    return {}
