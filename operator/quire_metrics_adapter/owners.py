"""Which pods belong to an LLMDeployment: by the uids of their owners, as the operator decides it.

A label says nothing, because everyone who may create a pod may label it, and the load of such a pod would
scale a stranger's replicas. A serving pod's controller is a ReplicaSet or, for the leader of a group of pods,
a StatefulSet; its controller is the Deployment or LeaderWorkerSet of the LLMDeployment's name, or the
Deployment of its prefill pods, whose controller is the LLMDeployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_metrics_adapter.errors import NotFoundError
from quire_metrics_adapter.kube_api import Connection
from quire_operator import names

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE = "500"
_MOST_STRANGERS = 100_000

Body = Mapping[str, Any]
Owner = tuple[str, str]  # namespace and name of an LLMDeployment


@dataclass(frozen=True)
class _Maker:
    """What makes pods: its collection, the label that names the LLMDeployment, and of which kind and in which
    collection its controller is.
    """

    of_makers: tuple[str, str]
    label: str
    workload: str
    of_workloads: tuple[str, str]


_MAKERS = {
    "ReplicaSet": _Maker(
        ("apps/v1", "replicasets"), names.LABEL_NAME, "Deployment", ("apps/v1", "deployments")
    ),
    "StatefulSet": _Maker(
        ("apps/v1", "statefulsets"),
        names.LABEL_GROUP_SET,
        names.GROUP_KIND,
        (names.GROUP_API_VERSION, "leaderworkersets"),
    ),
}


class Owners:
    """The ReplicaSets and StatefulSets of all LLMDeployments, by uid."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._makers: dict[str, Owner] = {}
        self._strangers: set[str] = set()  # uids of those of no LLMDeployment, until the next refresh

    async def refresh(self) -> None:
        """List what makes pods, and the Deployments and LeaderWorkerSets, of all LLMDeployments. Raises
        ApiError.
        """
        self._makers = await self._read("ReplicaSet") | await self._read("StatefulSet")
        self._strangers.clear()

    async def owner(self, pod: Body) -> Owner | None:
        """The LLMDeployment that the pod belongs to. A ReplicaSet or StatefulSet that is not known is read
        first. Raises ApiError.
        """
        namespace, name = deployment_of(pod)
        kind = next((kind for kind in _MAKERS if _controller(pod, kind)), "")
        maker = _controller(pod, kind).get("uid", "")
        if not (name and maker) or maker in self._strangers:
            return None
        if maker not in self._makers:
            self._makers |= await self._read(kind, namespace, name)
            if maker not in self._makers and len(self._strangers) < _MOST_STRANGERS:
                self._strangers.add(maker)
        found = self._makers.get(maker)
        return found if found == (namespace, name) else None

    async def _read(self, kind: str, namespace: str = "", name: str = "") -> dict[str, Owner]:
        """The objects of `kind` that belong to LLMDeployments, or to the one of this name, by uid."""
        maker = _MAKERS[kind]
        equals = f"={name}" if name else ""
        try:
            workloads = await self._list(maker.of_workloads, namespace, f"{names.LABEL_NAME}{equals}")
        except NotFoundError:
            return {}  # LeaderWorkerSet is not installed
        if not workloads:
            return {}
        made = await self._list(maker.of_makers, namespace, f"{maker.label}{equals}")
        return _owned(made, workloads, maker.workload)

    async def _list(self, collection: tuple[str, str], namespace: str, selector: str) -> list[Body]:
        version, plural = collection
        path = f"/apis/{version}{f'/namespaces/{namespace}' if namespace else ''}/{plural}"
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


def _owned(made: list[Body], workloads: list[Body], kind: str) -> dict[str, Owner]:
    """Those that were made for a workload of this kind that belongs to the LLMDeployment that its name says,
    by uid.
    """
    ours = {}
    for body in workloads:
        metadata = body["metadata"]
        name = _controller(body, names.KIND).get("name", "")
        if metadata["name"] in (name, names.workload(name, names.ROLE_PREFILL)):
            ours[str(metadata["uid"])] = (str(metadata["namespace"]), name)
    found = {}
    for body in made:
        if owner := ours.get(_controller(body, kind).get("uid", "")):
            found[str(body["metadata"]["uid"])] = owner
    return found


def _controller(body: Body, kind: str) -> Mapping[str, str]:
    """The owner reference of the object's controller, if that is of `kind`."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == kind:
            return {key: str(owner.get(key, "")) for key in ("uid", "name")}
    return {}
