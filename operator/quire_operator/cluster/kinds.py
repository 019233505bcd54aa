"""The kinds that the operator reads or writes, their API paths, and the verbs it needs.

A fixed table instead of discovery: the operator can touch these kinds and no others, as its RBAC role grants.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator import names

_READ = ("get", "list", "watch")
_WRITE = ("create", "patch", "delete")
_UNWATCHED = ("get", "list", *_WRITE)


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    api_version: str
    kind: str
    plural: str
    label: str = names.LABEL_NAME  # watched are the objects with this label, all objects where empty
    optional: bool = False  # its CRD may not be installed: it is read on demand
    on_demand: bool = False  # without the right to it, LLMDeployments that do not use it are still served
    verbs: tuple[str, ...] = (*_READ, *_WRITE)

    @property
    def is_watched(self) -> bool:
        """Whether it is watched; other kinds are known from re-lists and our own writes."""
        return "watch" in self.verbs

    @property
    def group(self) -> str:
        """The API group, empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def rule(self) -> str:
        """The RBAC rule that it needs, as in a manifest."""
        verbs = ", ".join(self.verbs)
        return f'{{apiGroups: ["{self.group}"], resources: [{self.plural}], verbs: [{verbs}]}}'

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of a collection or an object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


def _others(api_version: str, kind: str, plural: str) -> Kind:
    """A kind whose CRD other software installs."""
    return Kind(api_version, kind, plural, optional=True, on_demand=True, verbs=_UNWATCHED)


LLM_DEPLOYMENT = Kind(names.API_VERSION, names.KIND, names.PLURAL, label="", verbs=_READ)
# Cluster-scoped, and read by name when an LLMDeployment names one: no right to list them is needed.
PROFILE = Kind(names.API_VERSION, names.PROFILE_KIND, names.PROFILE_PLURAL, label="", verbs=("get",))
# Metadata only, and only where the administrator restricts references to Secrets: the operator never asks for
# data.
SECRET = Kind("v1", "Secret", "secrets", label="", verbs=("get",))
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases", verbs=("get", "list", "watch", "create", "update"))
EVENT = Kind("events.k8s.io/v1", "Event", "events", verbs=("create", "list"))
POD = Kind("v1", "Pod", "pods", verbs=(*_READ, "patch", "delete"))
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets", verbs=_READ)
# Only the operator writes them: a watch would repeat what it knows, ten objects for every LLMDeployment.
REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions", verbs=_UNWATCHED)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
# All of them: another owner's autoscaler of our Deployment has no label of ours.
HPA = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", label="", on_demand=True)

# KEDA. Its HorizontalPodAutoscaler is watched, whose events cover most changes of a ScaledObject.
SCALED_OBJECT = _others("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")

# Of the Gateway API and its inference extension.
HTTP_ROUTE = _others("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
INFERENCE_POOL = _others("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")

LEADER_WORKER_SET = _others(names.GROUP_API_VERSION, names.GROUP_KIND, "leaderworkersets")

CHILDREN = (
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("v1", "ConfigMap", "configmaps"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", on_demand=True),
    Kind("batch/v1", "Job", "jobs", on_demand=True),
    Kind("v1", "Service", "services"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    HPA,
    SCALED_OBJECT,
    HTTP_ROUTE,
    INFERENCE_POOL,
    DEPLOYMENT,
    LEADER_WORKER_SET,
)

# All cached kinds, LLMDeployments first.
CACHED = (LLM_DEPLOYMENT, *CHILDREN, REVISION, REPLICA_SET, POD)
WATCHED = tuple(kind for kind in CACHED if kind.is_watched)

BY_NAME = {kind.kind: kind for kind in (*CACHED, LEASE, EVENT, SECRET)}
