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
    label: str = names.LABEL_NAME  # which objects are watched: those that carry it, all of them where empty
    optional: bool = (
        False  # somebody else installs its CRD, or nobody: it is not watched but read when wanted
    )

    @property
    def group(self) -> str:
        """The API group, empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection or an object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


LLM_DEPLOYMENT = Kind(names.API_VERSION, names.KIND, names.PLURAL, label="")
# Of the whole cluster, and read by name when an LLMDeployment names one: no right to list them is needed.
PROFILE = Kind(names.API_VERSION, names.PROFILE_KIND, names.PROFILE_PLURAL, label="")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
POD = Kind("v1", "Pod", "pods")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
# Somebody else's autoscaler of our Deployment carries no label of ours.
HPA = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", label="")

# KEDA's. Its HorizontalPodAutoscaler is watched, and so most that happens to a ScaledObject is told of.
SCALED_OBJECT = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", optional=True)

# Of the Gateway API and its inference extension.
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes", optional=True)
INFERENCE_POOL = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools", optional=True)

CHILDREN = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Kind("batch/v1", "Job", "jobs"),
    Kind("v1", "Service", "services"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    HPA,
    SCALED_OBJECT,
    HTTP_ROUTE,
    INFERENCE_POOL,
    DEPLOYMENT,
)

# Everything that is kept in the cache, the LLMDeployments first.
CACHED = (LLM_DEPLOYMENT, *CHILDREN, REVISION, REPLICA_SET, POD)
WATCHED = tuple(kind for kind in CACHED if not kind.optional)

BY_NAME = {kind.kind: kind for kind in (*CACHED, LEASE, EVENT)}
