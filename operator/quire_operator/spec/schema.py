"""The schema of an LLMDeployment's spec as frozen dataclasses: each field is a property of the CRD, in
camelCase there.

Type, default and bounds are declared beside each field (`field_types`); a contract test holds them equal to
the CRD's. `reader` fills the dataclasses from a manifest. Rules that join several fields are in `validation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_operator.spec.field_types import (
    choice,
    default_text,
    items,
    mapping,
    number,
    optional_number,
    quantity,
    required_quantity,
    required_text,
    text,
    texts,
)

# Regular expressions without anchors: the reader and the CRD match the whole text.
DNS_1123_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"({DNS_1123_SUBDOMAIN}/)?{LABEL_VALUE}"
ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
NO_NUL = r"[^\x00]*"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HTTP_ADDRESS = rf"https?://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(:{_PORT})?"
_REPO_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
HUB_REPO = rf"{_REPO_PART}(/{_REPO_PART})?"
HUB_REVISION = r"[A-Za-z0-9][A-Za-z0-9_+-]*([./][A-Za-z0-9_+-]+)*"
OBJECTS = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._=+,-]*)*/?"
_OCI_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_OCI_HOST = r"((localhost|[a-z0-9-]+(\.[a-z0-9-]+)+)(:[0-9]{1,5})?|[a-z0-9-]+:[0-9]{1,5})"
OCI_REFERENCE = (
    rf"{_OCI_HOST}/{_OCI_PART}(/{_OCI_PART})*(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
)
AUTO = "Auto"
MAX_RANKS = 32  # of a replica
RESOURCE_NAME = f"{DNS_1123_SUBDOMAIN}/{LABEL_VALUE}"
IDENTIFIER = r"[A-Za-z0-9._:-]*"
ADDRESS = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?:[0-9]{1,5}"
PRINTABLE = r"[^\x00-\x1f\x7f]*"
FILE_NAME = r"[^\x00-\x1f\x7f/]*"
DNS_1123_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
HOSTNAME = rf"(\*\.)?{DNS_1123_SUBDOMAIN}"
# What the Gateway API takes as a prefix, without the parts that it refuses (//, /./, /../, an escaped slash).
HEADER_NAME = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
PATH = r"(/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+)"
MODEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9._/:@+-]*[A-Za-z0-9])?"
CIDR = r"[0-9a-fA-F:.]+/[0-9]{1,3}"
ADAPTER_NAME = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,251}[A-Za-z0-9])?"


@dataclass(frozen=True, kw_only=True)
class SecretKeyRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    key: str = required_text(r"[-._a-zA-Z0-9]+", 253)


@dataclass(frozen=True, kw_only=True)
class ObjectRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)


@dataclass(frozen=True, kw_only=True)
class ConfigMapKeyRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    key: str = default_text("chat_template.jinja", r"[-._a-zA-Z0-9]+", 253)


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    name: str = required_text(ENV_NAME, 128)
    value: str = text(NO_NUL, 4096)


@dataclass(frozen=True, kw_only=True)
class PersistentVolumeClaim:
    claim_name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    path: str = text(PRINTABLE, 512)


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    repo: str = required_text(HUB_REPO, 193)
    revision: str = text(HUB_REVISION, 200)
    endpoint: str = text(HTTP_ADDRESS, 256)
    token_secret_ref: SecretKeyRef | None = None


@dataclass(frozen=True, kw_only=True)
class S3:
    uri: str = required_text(f"s3://{OBJECTS}", 900)
    endpoint: str = text(HTTP_ADDRESS, 256)
    region: str = text(r"[a-z0-9-]+", 64)
    credentials_secret_ref: ObjectRef | None = None
    anonymous: bool = False


@dataclass(frozen=True, kw_only=True)
class GCS:
    uri: str = required_text(f"gs://{OBJECTS}", 900)
    credentials_secret_ref: SecretKeyRef | None = None
    anonymous: bool = False


@dataclass(frozen=True, kw_only=True)
class OCI:
    reference: str = required_text(OCI_REFERENCE, 512)
    pull_secret_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Exactly one of them is set."""

    pvc: PersistentVolumeClaim | None = None
    hugging_face: HuggingFace | None = None
    s3: S3 | None = None
    gcs: GCS | None = None
    oci: OCI | None = None

    @property
    def uri(self) -> str:
        """The source argument of `quire-server fetch`; empty for a claim, which already holds the model."""
        if self.hugging_face is not None:
            return f"hf://{self.hugging_face.repo}@{self.hugging_face.revision or 'main'}"
        if self.oci is not None:
            return f"oci://{self.oci.reference}"
        bucket = self.s3 or self.gcs
        return bucket.uri if bucket is not None else ""

    @property
    def is_anonymous(self) -> bool:
        """Whether a bucket is read without any credentials."""
        bucket = self.s3 or self.gcs
        return bucket is not None and bucket.anonymous

    @property
    def has_credentials(self) -> bool:
        """Whether the download gets credentials of a Secret."""
        return any(
            (
                self.hugging_face is not None and self.hugging_face.token_secret_ref,
                self.s3 is not None and self.s3.credentials_secret_ref,
                self.gcs is not None and self.gcs.credentials_secret_ref,
                self.oci is not None and self.oci.pull_secret_ref,
            )
        )

    @property
    def endpoint(self) -> str:
        """The address of a private hub or object store; empty where none is given."""
        own = self.hugging_face or self.s3
        return own.endpoint if own is not None else ""


@dataclass(frozen=True, kw_only=True)
class Download:
    timeout_seconds: int = number(60, 604_800, 7200)
    env: tuple[EnvVar, ...] = items(32)
    ca_bundle_config_map_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class ModelCache:
    mode: str = field(metadata={"enum": ["SharedPVC", "PerReplica", "None"]})
    size: str = quantity()
    storage_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    access_mode: str = field(default="", metadata={"enum": ["ReadWriteMany", "ReadWriteOnce"]})
    existing_claim: str = field(
        default="", metadata={"pattern": f"^{DNS_1123_SUBDOMAIN}$", "maxLength": 253, "minLength": 1}
    )
    retain_policy: str = choice("Delete", "Retain")
    download: Download = Download()

    @property
    def is_shared(self) -> bool:
        """Whether all pods share one claim, which a Job fills before they start."""
        return self.mode == "SharedPVC"

    @property
    def is_of_one_node(self) -> bool:
        """Whether that claim can be mounted by one node at a time only."""
        return self.is_shared and self.access_mode == "ReadWriteOnce"


@dataclass(frozen=True, kw_only=True)
class Model:
    source: Source
    served_name: str = text(MODEL_NAME, 128)
    aliases: tuple[str, ...] = texts(MODEL_NAME, 128, 16)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter: a name in requests, and where its files come from."""

    name: str = required_text(ADAPTER_NAME, 253)
    source: Source


@dataclass(frozen=True, kw_only=True)
class GPU:
    resource_name: str = default_text("nvidia.com/gpu", RESOURCE_NAME, 253)
    memory_percent: int = number(1, 98, 90)


@dataclass(frozen=True, kw_only=True)
class ProfileRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    memory_percent: int = number(1, 98, 90)


@dataclass(frozen=True, kw_only=True)
class Resources:
    cpu: str = required_quantity()
    memory: str = required_quantity()
    gpu: GPU | None = None
    profile_ref: ProfileRef | None = None
    shared_memory: str = field(default=AUTO, metadata={"quantity": True, "or": AUTO})

    @property
    def accelerator(self) -> GPU | ProfileRef | None:
        """The accelerator that is requested; None where the model runs on the CPU."""
        return self.gpu or self.profile_ref


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks compute the model together, on how many nodes, and how their pods authenticate."""

    tensor: int = number(1, MAX_RANKS, 1)
    pipeline: int = number(1, MAX_RANKS, 1)
    nodes: int = number(1, MAX_RANKS, 1)
    auth_secret_ref: ObjectRef | None = None

    @property
    def ranks(self) -> int:
        """Processes that compute the model, of all nodes."""
        return self.tensor * self.pipeline

    @property
    def ranks_per_pod(self) -> int:
        """Those of each node."""
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class RoleResources:
    cpu: str = required_quantity()
    memory: str = required_quantity()
    gpu: GPU | None = None
    profile_ref: ProfileRef | None = None

    @property
    def accelerator(self) -> GPU | ProfileRef | None:
        """Instead of that of `spec.resources`."""
        return self.gpu or self.profile_ref


@dataclass(frozen=True, kw_only=True)
class RoleParallelism:
    """Ranks of the pods of one role, all on one node."""

    tensor: int = number(1, MAX_RANKS, 1)
    pipeline: int = number(1, MAX_RANKS, 1)


@dataclass(frozen=True, kw_only=True)
class PrefillAutoscaling:
    max_replicas: int = field(metadata={"minimum": 1, "maximum": 1000})
    min_replicas: int = number(1, 1000, 1)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    replicas: int = number(1, 1000, 1)
    resources: RoleResources | None = None
    parallelism: RoleParallelism | None = None
    autoscaling: PrefillAutoscaling | None = None


@dataclass(frozen=True, kw_only=True)
class Decode:
    replicas: int | None = optional_number(1, 1000)
    resources: RoleResources | None = None
    parallelism: RoleParallelism | None = None


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Pods of their own for prefill, beside those that clients talk to."""

    prefill: Prefill
    decode: Decode = Decode()
    local_prefill_below_tokens: int = number(1, 16_777_216, 512)
    lease_seconds: int = number(1, 3600, 30)
    transport: str = choice("Auto", "TCP", "NIXL")
    staging_memory: str = field(default="4Gi", metadata={"quantity": True})


@dataclass(frozen=True, kw_only=True)
class Toleration:
    key: str = text(LABEL_KEY, 317)
    operator: str = choice("Equal", "Exists")
    value: str = text(LABEL_VALUE, 63)
    effect: str = field(default="", metadata={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]})
    toleration_seconds: int | None = optional_number(0, 31_536_000)


@dataclass(frozen=True, kw_only=True)
class Spot:
    enabled: bool = False
    fallback_to_on_demand: bool = True
    notice_seconds: int = number(10, 3600, 25)


@dataclass(frozen=True, kw_only=True)
class LabelRequirement:
    key: str = required_text(LABEL_KEY, 317)
    operator: str = field(metadata={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]})
    values: tuple[str, ...] = texts(f"({LABEL_VALUE})?", 63, 32)


@dataclass(frozen=True, kw_only=True)
class LabelSelector:
    match_labels: Mapping[str, str] = mapping(LABEL_VALUE, 63)
    match_expressions: tuple[LabelRequirement, ...] = items(16)


@dataclass(frozen=True, kw_only=True)
class NodeSelectorRequirement:
    key: str = required_text(LABEL_KEY, 317)
    operator: str = field(metadata={"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]})
    values: tuple[str, ...] = texts(f"({LABEL_VALUE})?", 63, 256)


@dataclass(frozen=True, kw_only=True)
class NodeFieldRequirement:
    key: str = field(metadata={"enum": ["metadata.name"]})
    operator: str = field(metadata={"enum": ["In", "NotIn"]})
    values: tuple[str, ...] = texts(DNS_1123_SUBDOMAIN, 253, 1)


@dataclass(frozen=True, kw_only=True)
class NodeSelectorTerm:
    match_expressions: tuple[NodeSelectorRequirement, ...] = items(32)
    match_fields: tuple[NodeFieldRequirement, ...] = items(8)


@dataclass(frozen=True, kw_only=True)
class NodeSelector:
    node_selector_terms: tuple[NodeSelectorTerm, ...] = field(metadata={"minItems": 1, "maxItems": 32})


@dataclass(frozen=True, kw_only=True)
class PreferredNodes:
    weight: int = field(metadata={"minimum": 1, "maximum": 100})
    preference: NodeSelectorTerm


@dataclass(frozen=True, kw_only=True)
class NodeAffinity:
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] = items(32)


@dataclass(frozen=True, kw_only=True)
class PodAffinityTerm:
    topology_key: str = required_text(LABEL_KEY, 317)
    label_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = texts(LABEL_KEY, 317, 16)
    mismatch_label_keys: tuple[str, ...] = texts(LABEL_KEY, 317, 16)
    namespaces: tuple[str, ...] = texts(DNS_1123_LABEL, 63, 32)
    namespace_selector: LabelSelector | None = None


@dataclass(frozen=True, kw_only=True)
class PreferredPods:
    weight: int = field(metadata={"minimum": 1, "maximum": 100})
    pod_affinity_term: PodAffinityTerm


@dataclass(frozen=True, kw_only=True)
class PodAffinity:
    required_during_scheduling_ignored_during_execution: tuple[PodAffinityTerm, ...] = items(32)
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredPods, ...] = items(32)


@dataclass(frozen=True, kw_only=True)
class Affinity:
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    node_selector: Mapping[str, str] = mapping(LABEL_VALUE, 63)
    tolerations: tuple[Toleration, ...] = items(32)
    affinity: Affinity | None = None
    priority_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    runtime_class_name: str = text(DNS_1123_SUBDOMAIN, 253)
    scheduler_name: str = text(DNS_1123_SUBDOMAIN, 253)
    topology_spread: str = choice("Auto", "None")
    queue_name: str = text(LABEL_VALUE, 63)
    spot: Spot = Spot()


@dataclass(frozen=True, kw_only=True)
class KVCache:
    memory: str = quantity()
    dtype: str = choice("Auto", "FP8", "Int8")
    block_size: int | None = optional_number(1, 256)
    host_offload: str = quantity()
    disk_offload: str = quantity()
    preemption_mode: str = choice("Recompute", "Swap")


@dataclass(frozen=True, kw_only=True)
class Watermark:
    mode: str = choice("Off", "OnRequest", "Always")
    key_secret_ref: SecretKeyRef | None = None


@dataclass(frozen=True, kw_only=True)
class Speculation:
    method: str = choice("None", "NGram", "DraftModel")
    num_tokens: int = number(1, 16, 4)
    draft_model_path: str = text(PRINTABLE, 512)


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Exactly one of them is set."""

    config_map_ref: ConfigMapKeyRef | None = None
    file: str = text(FILE_NAME, 255)


@dataclass(frozen=True, kw_only=True)
class Engine:
    max_model_len: int | None = optional_number(1, 16_777_216)
    max_num_seqs: int | None = optional_number(1, 4096)
    dtype: str = choice("Auto", "Float32", "BFloat16")
    quantization: str = choice("Auto", "None", "Int8", "Int4")
    kv_cache: KVCache = KVCache()
    weight_offload: str = quantity()
    enforce_eager: bool = False
    prefix_caching: bool = True
    chunked_prefill: bool = True
    max_queue_length: int = number(1, 100_000, 512)
    max_queued_tokens: int | None = optional_number(1, 1_000_000_000)
    max_requests_per_key: int | None = optional_number(1, 100_000)
    max_requests_per_minute_per_key: int | None = optional_number(1, 1_000_000)
    max_tokens_per_minute_per_key: int | None = optional_number(1, 1_000_000_000)
    request_timeout_seconds: int | None = optional_number(1, 86_400)
    scheduling_policy: str = choice("FCFS", "Priority", "SJF")
    generation_config: str = choice("Auto", "None")
    tool_call_parser: str = choice("Auto", "Hermes", "Llama", "Mistral", "Pythonic", "Gemma", "None")
    reasoning_parser: str = choice("Auto", "Think", "None")
    pooling: str = choice("Auto", "CLS", "Mean", "Last")
    max_adapters: int | None = optional_number(1, 64)
    max_adapter_rank: int | None = optional_number(1, 64)
    adapters_path: str = text(PRINTABLE, 512)
    chat_template: ChatTemplate | None = None
    watermark: Watermark = Watermark()
    speculation: Speculation = Speculation()
    extra_args: tuple[str, ...] = texts(NO_NUL, 1024, 64)
    env: tuple[EnvVar, ...] = items(64)


@dataclass(frozen=True, kw_only=True)
class StartupProbe:
    period_seconds: int = number(1, 60, 5)
    timeout_seconds: int = number(1, 60, 3)


@dataclass(frozen=True, kw_only=True)
class ReadinessProbe:
    period_seconds: int = number(1, 60, 3)
    timeout_seconds: int = number(1, 60, 3)
    failure_threshold: int = number(1, 60, 2)


@dataclass(frozen=True, kw_only=True)
class LivenessProbe:
    period_seconds: int = number(1, 60, 10)
    timeout_seconds: int = number(1, 60, 5)
    failure_threshold: int = number(1, 60, 3)


@dataclass(frozen=True, kw_only=True)
class Probes:
    startup: StartupProbe = StartupProbe()
    readiness: ReadinessProbe = ReadinessProbe()
    liveness: LivenessProbe = LivenessProbe()


@dataclass(frozen=True, kw_only=True)
class Health:
    startup_timeout_seconds: int = number(10, 86_400, 1800)
    load_stall_timeout_seconds: int = number(5, 86_400, 300)
    stall_timeout_seconds: int = number(5, 3600, 60)
    canary_interval_seconds: int = number(1, 3600, 60)
    probes: Probes = Probes()


@dataclass(frozen=True, kw_only=True)
class Drain:
    pre_stop_seconds: int = number(0, 120, 10)
    timeout_seconds: int | None = optional_number(1, 3600)


@dataclass(frozen=True, kw_only=True)
class Metric:
    type: str = field(
        metadata={"enum": ["QueueDepth", "RunningRequests", "KVCacheUtilization", "GPUUtilization"]}
    )
    target_per_replica: int | None = optional_number(1, 100_000)


@dataclass(frozen=True, kw_only=True)
class ScaleUp:
    stabilization_window_seconds: int = number(0, 3600, 0)
    period_seconds: int | None = optional_number(1, 1800)
    pods: int = number(1, 1000, 1)
    percent: int = number(0, 1000, 50)


@dataclass(frozen=True, kw_only=True)
class ScaleDown:
    stabilization_window_seconds: int = number(0, 3600, 300)
    period_seconds: int = number(1, 1800, 60)
    pods: int = number(1, 1000, 1)


@dataclass(frozen=True, kw_only=True)
class Behavior:
    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()


@dataclass(frozen=True, kw_only=True)
class Activator:
    scaler_address: str = required_text(ADDRESS, 253)
    metadata: Mapping[str, str] = mapping(PRINTABLE, 253)


@dataclass(frozen=True, kw_only=True)
class Idle:
    replicas: int = number(0, 0, 0)  # with any other number KEDA's own autoscaler scales up again
    after_seconds: int = number(1, 86_400, 1800)
    activator: Activator | None = None


@dataclass(frozen=True, kw_only=True)
class Fallback:
    replicas: int = field(metadata={"minimum": 1, "maximum": 1000})
    failure_threshold: int = number(1, 100, 3)


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    max_replicas: int = field(metadata={"minimum": 1, "maximum": 1000})
    min_replicas: int = number(0, 1000, 1)
    backend: str = choice("Auto", "HPA", "KEDA", "External")
    metrics: tuple[Metric, ...] = items(4)
    behavior: Behavior = Behavior()
    idle: Idle | None = None
    fallback: Fallback | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    pool: str = required_text(DNS_1123_LABEL, 63)
    minimum_stay_seconds: int = number(10, 86_400, 60)


@dataclass(frozen=True, kw_only=True)
class Disruption:
    max_unavailable: int = number(1, 1000, 1)
    protect_while_loading: bool = True


@dataclass(frozen=True, kw_only=True)
class Rollout:
    strategy: str = choice("Auto", "Surge", "InPlace", "Recreate")
    max_surge: int = number(0, 100, 1)
    max_unavailable: int = number(0, 100, 0)
    surge_wait_seconds: int = number(10, 3600, 120)
    min_ready_seconds: int = number(0, 300, 0)
    restart_id: str = text(IDENTIFIER, 64)
    paused: bool = False
    auto_rollback: bool = False
    adopt_operator_defaults: str = choice("OnSpecChange", "Always")


@dataclass(frozen=True, kw_only=True)
class Service:
    type: str = choice("ClusterIP", "NodePort", "LoadBalancer")
    port: int = number(1, 65_535, 80)
    annotations: Mapping[str, str] = mapping(NO_NUL, 4096)


@dataclass(frozen=True, kw_only=True)
class IPBlock:
    cidr: str = required_text(CIDR, 49)


@dataclass(frozen=True, kw_only=True)
class Peer:
    namespace_selector: LabelSelector | None = None
    pod_selector: LabelSelector | None = None
    ip_block: IPBlock | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkPolicy:
    mode: str = choice("Restricted", "None")
    allow_from: tuple[Peer, ...] = items(32)


@dataclass(frozen=True, kw_only=True)
class ParentRef:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    namespace: str = text(DNS_1123_LABEL, 63)
    section_name: str = text(DNS_1123_SUBDOMAIN, 253)


@dataclass(frozen=True, kw_only=True)
class Route:
    parent_refs: tuple[ParentRef, ...] = field(metadata={"minItems": 1, "maxItems": 8})
    hostnames: tuple[str, ...] = texts(HOSTNAME, 253, 16)
    path: str = default_text("/", PATH, 256)
    model_header: str = text(HEADER_NAME, 256)


@dataclass(frozen=True, kw_only=True)
class EndpointPicker:
    name: str = required_text(DNS_1123_SUBDOMAIN, 253)
    port: int = number(1, 65_535, 9002)


@dataclass(frozen=True, kw_only=True)
class InferencePool:
    endpoint_picker_ref: EndpointPicker
    enabled: bool = True
    failure_mode: str = choice("FailClose", "FailOpen")


@dataclass(frozen=True, kw_only=True)
class Networking:
    service: Service = Service()
    network_policy: NetworkPolicy = NetworkPolicy()
    http_route: Route | None = None
    inference_pool: InferencePool | None = None


@dataclass(frozen=True, kw_only=True)
class Identity:
    workload: str = choice("None", "GKE", "EKS", "AKS")


@dataclass(frozen=True, kw_only=True)
class Security:
    api_keys_secret_ref: ObjectRef | None = None
    service_account_name: str = text(DNS_1123_SUBDOMAIN, 253)
    identity: Identity = Identity()


@dataclass(frozen=True, kw_only=True)
class Tracing:
    endpoint: str = text(HTTP_ADDRESS, 256)
    sampling_rate_per_million: int = number(0, 1_000_000, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class RequestLogging:
    mode: str = choice("Metadata", "Off", "Content")
    max_characters: int = number(0, 1_000_000, 2000)
    redact_config_map_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True)
class Observability:
    tracing: Tracing = Tracing()
    request_logging: RequestLogging = RequestLogging()


@dataclass(frozen=True, kw_only=True)
class Spec:
    model: Model
    resources: Resources
    task: str = choice("Generate", "Embed")
    cache: ModelCache | None = None
    engine: Engine = Engine()
    adapters: tuple[Adapter, ...] = items(64)
    parallelism: Parallelism = Parallelism()
    disaggregation: Disaggregation | None = None
    replicas: int = number(0, 1000, 1)
    autoscaling: Autoscaling | None = None
    sharing: Sharing | None = None
    suspend: bool = False
    scheduling: Scheduling = Scheduling()
    health: Health = Health()
    drain: Drain = Drain()
    disruption: Disruption = Disruption()
    networking: Networking = Networking()
    security: Security = Security()
    observability: Observability = Observability()
    rollout: Rollout = Rollout()
