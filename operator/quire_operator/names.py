"""Every name that leaves the operator: API group, labels, annotations, ports, paths.

Whoever writes or reads an object in the cluster takes its names from here, so that none is spelt twice.
Constants and the functions that compose them; this module knows no settings and no spec.
"""

from __future__ import annotations

GROUP = "serving.quire.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"

FIELD_MANAGER = "quire-operator"
LEASE = "quire-operator"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_APP = "app.kubernetes.io/name"
LABEL_NAME = f"{GROUP}/name"
LABEL_ROLE = f"{GROUP}/role"

MANAGED_BY = "quire-operator"
APP = "quire-server"
ROLE_LEADER = "leader"
ROLE_FETCHER = "fetcher"

ANNOTATION_APPLIED_HASH = f"{GROUP}/applied-hash"
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ANNOTATION_RESTART_ID = f"{GROUP}/restart-id"
ANNOTATION_RENDER_REVISION = f"{GROUP}/render-revision"
ANNOTATION_ROLLBACK_TO = f"{GROUP}/rollback-to"
ANNOTATION_ROLLOUT_FAILED = f"{GROUP}/rollout-failed"

# Put on pods until they are ready for the first time; the operator takes them off then.
PROTECT_WHILE_LOADING = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}

CONTAINER = "server"
FETCHER = "fetch"
FETCHED_DIR = "model"
PORT_HTTP = 8000
PORT_HTTP_NAME = "http"
PORT_HEALTH = 8001
PORT_HEALTH_NAME = "health"

PATH_LOG_REDACT = "/etc/quire/redact"
PATH_MODELS = "/models"
PATH_CA_BUNDLE = "/etc/quire/ca"
PATH_GCS_KEY = "/etc/quire/gcs"
PATH_PULL_SECRET = "/etc/quire/registry"
PATH_API_KEYS = "/etc/quire/keys"
PATH_HOME = "/home/quire"
PATH_KV_OFFLOAD = "/var/cache/quire/kv"
PATH_SHARED_MEMORY = "/dev/shm"
PATH_WATERMARK = "/etc/quire/watermark"
PATH_TERMINATION_LOG = "/dev/termination-log"

USER_ID = 65532

# What the metrics adapter serves of an LLMDeployment: sums over its ready pods, by the name in the spec.
METRICS = {
    "QueueDepth": "llm_queue_depth",
    "RunningRequests": "llm_running_requests",
    "KVCacheUtilization": "llm_kv_cache_utilization",
    "GPUUtilization": "llm_gpu_utilization",
}
# Those that are between 0 and 1 in each pod; the spec gives them in percent.
SHARES = frozenset({"KVCacheUtilization", "GPUUtilization"})

ENV_FAULT = "QUIRE_FAULT"
ENV_ALLOW_FAULTS = "QUIRE_ALLOW_FAULTS"


def child_labels(name: str) -> dict[str, str]:
    """Labels of every object that belongs to the LLMDeployment `name`."""
    return {LABEL_APP: APP, LABEL_MANAGED_BY: MANAGED_BY, LABEL_NAME: name}


def selector_labels(name: str) -> dict[str, str]:
    """What selects the serving pods of `name`: immutable in a Deployment, so never to be changed."""
    return {LABEL_NAME: name, LABEL_ROLE: ROLE_LEADER}


def fetcher_labels(name: str) -> dict[str, str]:
    """What selects the pod that fills the shared claim of `name`, and no serving pod."""
    return {LABEL_NAME: name, LABEL_ROLE: ROLE_FETCHER}


def selector(name: str) -> str:
    """The same selector as text, for status.selector and for list calls."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(name).items())


def model_path(path: str) -> str:
    """Where a directory of the model's volume is in the pod; the empty path is the volume's root."""
    return f"{PATH_MODELS}/{path}" if path else PATH_MODELS
