"""The kinds that the operator reads or writes, and where the API server keeps them.

A fixed table instead of discovery: the operator can touch these and nothing else, as its RBAC says too.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator import names


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """The API group, empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection or an object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


LLM_DEPLOYMENT = Kind(names.API_VERSION, names.KIND, names.PLURAL)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
POD = Kind("v1", "Pod", "pods")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")

CHILDREN = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("v1", "Service", "services"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Kind("apps/v1", "Deployment", "deployments"),
)

# Everything that is watched and kept in the cache, the LLMDeployments first.
WATCHED = (LLM_DEPLOYMENT, *CHILDREN, REPLICA_SET, POD)

BY_NAME = {kind.kind: kind for kind in (*WATCHED, LEASE, EVENT)}
