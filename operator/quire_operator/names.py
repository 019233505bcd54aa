"""Every name that leaves the operator: API group, labels, annotations, ports, paths.

All code that writes or reads objects in the cluster takes names from here, so that none is spelt twice.
Constants and functions that compose them; knows no settings and no spec.
"""

from __future__ import annotations

GROUP = "serving.quire.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
PROFILE_KIND = "AcceleratorProfile"
PROFILE_PLURAL = "acceleratorprofiles"

FIELD_MANAGER = "quire-operator"
LEASE = "quire-operator"

KUEUE_GATES = "kueue.x-k8s.io/"
LABEL_QUEUE = f"{KUEUE_GATES}queue-name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_APP = "app.kubernetes.io/name"
LABEL_NAME = f"{GROUP}/name"
LABEL_ROLE = f"{GROUP}/role"
LABEL_NAMESPACE = f"{GROUP}/namespace"
LABEL_POOL = f"{GROUP}/pool"  # of pods whose LLMDeployments share an accelerator
# Of a claim or Secret that LLMDeployments may name: who may label it decides.
LABEL_REFERABLE = f"{GROUP}/referable"

MANAGED_BY = "quire-operator"
APP = "quire-server"
ROLE_LEADER = "leader"  # of the pods that clients talk to; decode pods where prefill has pods of its own
ROLE_PREFILL = "prefill"
ROLE_FETCHER = "fetcher"
ROLE_WORKER = "worker"
ROLE_DEMAND = "demand"  # of the Lease that a gateway renews while requests wait for a model without pods

# LeaderWorkerSet: groups of pods, of which the leader serves.
GROUP_API_VERSION = "leaderworkerset.x-k8s.io/v1"
GROUP_KIND = "LeaderWorkerSet"
_GROUP_PREFIX = "leaderworkerset.sigs.k8s.io"
LABEL_GROUP_SET = f"{_GROUP_PREFIX}/name"
LABEL_GROUP_INDEX = f"{_GROUP_PREFIX}/group-index"
LABEL_GROUP_KEY = f"{_GROUP_PREFIX}/group-key"
LABEL_GROUP_REVISION = f"{_GROUP_PREFIX}/template-revision-hash"
LABEL_WORKER_INDEX = f"{_GROUP_PREFIX}/worker-index"

ANNOTATION_APPLIED_HASH = f"{GROUP}/applied-hash"
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
ANNOTATION_RESTART_ID = f"{GROUP}/restart-id"
ANNOTATION_REFUSED_BESIDE = f"{GROUP}/refused-beside"
ANNOTATION_RENDER_REVISION = f"{GROUP}/render-revision"
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
ANNOTATION_ROLLBACK_TO = f"{GROUP}/rollback-to"
ANNOTATION_ROLLOUT_FAILED = f"{GROUP}/rollout-failed"

# Set on pods until they are ready for the first time; the operator removes them then.
PROTECT_WHILE_LOADING = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}

CONTAINER = "server"
FETCHER = "fetch"
FETCHED_DIR = "model"
ADAPTERS = "adapters"  # the sidecar that downloads LoRA adapters
ADAPTER_LIST_FILE = "adapters.json"
PORT_HTTP = 8000
PORT_HTTP_NAME = "http"
PORT_HEALTH = 8001
PORT_HEALTH_NAME = "health"
PORT_RANKS = 7600
PORT_RANKS_NAME = "ranks"
PORT_KV_TRANSFER = 7602
PORTS_NIXL = (7603, 7634)  # one for each network interface of a pod, and some to spare
PORT_KV_TRANSFER_NAME = "kv-transfer"

PATH_LOG_REDACT = "/etc/quire/redact"
PATH_MODELS = "/models"
PATH_ADAPTERS = "/adapters"
PATH_ADAPTER_CLAIMS = "/adapter-claims"
PATH_ADAPTER_LIST = "/etc/quire/adapters"
PATH_ADAPTER_SECRETS = "/run/quire/adapter-secrets"
PATH_CA_BUNDLE = "/etc/quire/ca"
PATH_GCS_KEY = "/etc/quire/gcs"
PATH_PULL_SECRET = "/etc/quire/registry"
PATH_API_KEYS = "/etc/quire/keys"
PATH_AUTH_KEY = "/etc/quire/auth"
PATH_GATEWAY_KEYS = "/etc/quire/gateway-keys"
PATH_CHAT_TEMPLATE = "/etc/quire/chat-template"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
PATH_GOLDEN_TOKENS = "/etc/quire/golden-tokens"
GOLDEN_TOKENS_FILE = "golden.json"
START_DELAY_KEY = "seconds"
PATH_HOME = "/home/quire"
PATH_KV_OFFLOAD = "/var/cache/quire/kv"
PATH_SHARED_MEMORY = "/dev/shm"
PATH_WATERMARK = "/etc/quire/watermark"
PATH_TERMINATION_LOG = "/dev/termination-log"

USER_ID = 65532

# The metrics that the metrics adapter serves for an LLMDeployment (sums over its ready pods), by their name
# in the spec.
METRICS = {
    "QueueDepth": "llm_queue_depth",
    "RunningRequests": "llm_running_requests",
    "KVCacheUtilization": "llm_kv_cache_utilization",
    "GPUUtilization": "llm_gpu_utilization",
}
# The same of the prefill pods, which the metrics above do not count.
METRICS_OF_PREFILL = {"QueueDepth": "llm_prefill_queue_depth"}
# Metrics that are between 0 and 1 in each pod; the spec gives their targets in percent.
SHARES = frozenset({"KVCacheUtilization", "GPUUtilization"})

ENV_PREFIX = "QUIRE_"  # variables of ours in the pods
ENV_FAULT = "QUIRE_FAULT"
ENV_ALLOW_FAULTS = "QUIRE_ALLOW_FAULTS"


# AKS's webhook gives pods with this label the credentials of their ServiceAccount.
AKS_IDENTITY = {"azure.workload.identity/use": "true"}


def golden_tokens(name: str) -> str:
    """The ConfigMap with the golden tokens of the LLMDeployment `name`."""
    return f"{name}-golden-tokens"


def adapters(name: str) -> str:
    """The ConfigMap with the list of adapters of the LLMDeployment `name`."""
    return f"{name}-adapters"


def child_labels(name: str) -> dict[str, str]:
    """Labels of every object that belongs to the LLMDeployment `name`."""
    return {LABEL_APP: APP, LABEL_MANAGED_BY: MANAGED_BY, LABEL_NAME: name}


def selector_labels(name: str, role: str = ROLE_LEADER) -> dict[str, str]:
    """Selector of the pods of `name` in a role. Immutable in a Deployment, so it must never change."""
    return {LABEL_NAME: name, LABEL_ROLE: role}


def workload(name: str, role: str = ROLE_LEADER) -> str:
    """The Deployment of `name` in a role, and what belongs to its pods."""
    return f"{name}-{role}" if role == ROLE_PREFILL else name


def worker_labels(name: str) -> dict[str, str]:
    """Selector of the pods of a group that do not serve, which matches no leader."""
    return {LABEL_NAME: name, LABEL_ROLE: ROLE_WORKER}


def start_delay(name: str) -> str:
    """The ConfigMap with the time for which groups of `name` that crash over and over wait at their start."""
    return f"{name}-start-delay"


def fetcher_labels(name: str) -> dict[str, str]:
    """Selector of the download pods of `name`, which matches no serving pod."""
    return {LABEL_NAME: name, LABEL_ROLE: ROLE_FETCHER}


def selector(name: str) -> str:
    """The same selector as text, for status.selector and for list calls."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(name).items())


def selector_of_all_roles(name: str) -> str:
    """The pods of `name` that serve, prefill pods too, as text."""
    return f"{LABEL_NAME}={name},{LABEL_ROLE} in ({ROLE_LEADER},{ROLE_PREFILL})"


def model_path(path: str) -> str:
    """The path in the pod of a directory on the model's volume; the empty path is the volume's root."""
    return f"{PATH_MODELS}/{path}" if path else PATH_MODELS
