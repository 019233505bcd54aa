"""The spec as frozen dataclasses: a field here is a property of the CRD, in camelCase there.

Types, defaults and bounds stand beside each field; a contract test holds them equal to the CRD's.
The reader fills the tree, the builders read it; rules that join several fields are in `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_operator.spec.bounds import (
    choice,
    items,
    mapping,
    number,
    optional_number,
    quantity,
    required_text,
    text,
    texts,
)
from quire_operator.spec.placement import Resources, Scheduling
from quire_operator.spec.references import (
    DNS_1123_SUBDOMAIN,
    HTTP_ADDRESS,
    LABEL_KEY,
    LABEL_VALUE,
    NO_NUL,
    PRINTABLE,
    EnvVar,
    ObjectRef,
    SecretKeyRef,
)
from quire_operator.spec.replicas import Autoscaling, Disruption, Rollout
from quire_operator.spec.routes import InferencePool, Route
from quire_operator.spec.sources import ModelCache, Source

# Expressions without anchors: the reader and the CRD match the whole text, and optional text may be empty.
MODEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9._/:@+-]*[A-Za-z0-9])?"
CIDR = r"[0-9a-fA-F:.]+/[0-9]{1,3}"


@dataclass(frozen=True, kw_only=True)
class Model:
    source: Source
    served_name: str = text(MODEL_NAME, 128)
    aliases: tuple[str, ...] = texts(MODEL_NAME, 128, 16)


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
class Engine:
    max_model_len: int | None = optional_number(1, 16_777_216)
    max_num_seqs: int | None = optional_number(1, 4096)
    dtype: str = choice("Auto", "Float32", "BFloat16")
    quantization: str = choice("Auto", "None", "Int8")
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
    period_seconds: int = number(1, 60, 5)
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
    timeout_seconds: int = number(1, 3600, 120)


@dataclass(frozen=True, kw_only=True)
class Service:
    type: str = choice("ClusterIP", "NodePort", "LoadBalancer")
    port: int = number(1, 65_535, 80)
    annotations: Mapping[str, str] = mapping(NO_NUL, 4096)


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
class Networking:
    service: Service = Service()
    network_policy: NetworkPolicy = NetworkPolicy()
    http_route: Route | None = None
    inference_pool: InferencePool | None = None


@dataclass(frozen=True, kw_only=True)
class Security:
    api_keys_secret_ref: ObjectRef | None = None
    service_account_name: str = text(DNS_1123_SUBDOMAIN, 253)


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
    cache: ModelCache | None = None
    engine: Engine = Engine()
    replicas: int | None = optional_number(0, 1000)
    autoscaling: Autoscaling | None = None
    suspend: bool = False
    scheduling: Scheduling = Scheduling()
    health: Health = Health()
    drain: Drain = Drain()
    disruption: Disruption = Disruption()
    networking: Networking = Networking()
    security: Security = Security()
    observability: Observability = Observability()
    rollout: Rollout = Rollout()
