"""Rules that a schema cannot express: across fields, or with a remedy of their own. The CRD has each of them
in CEL.

Every rule is a function named after the field it checks, in the order of the spec. One table of cases
(e2e/api) drives both this module and the CRD on a real API server, so that the two cannot drift apart.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields

from quire_operator import names, quantity
from quire_operator.errors import SpecError
from quire_operator.spec.schema import (
    AUTO,
    LABEL_KEY,
    MAX_RANKS,
    Adapter,
    Autoscaling,
    ChatTemplate,
    Decode,
    Disaggregation,
    EnvVar,
    HuggingFace,
    LabelSelector,
    ModelCache,
    Peer,
    Prefill,
    PrefillAutoscaling,
    Resources,
    RoleResources,
    Route,
    Scheduling,
    Source,
    Spec,
    Speculation,
    Toleration,
)

MAX_CACHE_SIZE = "64Ti"
MAX_CPU = "1024"
MIN_MEMORY, MAX_MEMORY = "64Mi", "64Ti"
MAX_DISK_OFFLOAD = "64Ti"
NAME_MAX_LENGTH = 40
NAME_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"

# The flags that extraArgs may set: each tunes the server and names no file, address or credential. All others
# are set by the operator, from fields of the spec.
ALLOWED_FLAGS = (
    "batching",
    "disable-fastapi-docs",
    "log-level",
    "max-connection-age-seconds",
    "max-num-batched-tokens",
    "num-gpu-blocks-override",
    "prompt-lookup-max",
    "prompt-lookup-min",
    "seed",
    "watermark-delta",
    "watermark-gamma",
)
# An element that does not begin with a dash is the value of the flag before it.
ARGUMENT_PATTERN = rf"(--(no-)?({'|'.join(ALLOWED_FLAGS)})(=(.|\n)*)?|[^-](.|\n)*)"
RESERVED_ENV_PATTERN = r"(QUIRE_|LD_|PYTHON).*"


def check_name(name: object) -> None:
    """Children are named after the LLMDeployment: a Service needs a DNS-1035 name, and some append a hash."""
    if not isinstance(name, str) or len(name) > NAME_MAX_LENGTH or not re.fullmatch(NAME_PATTERN, name):
        raise SpecError(
            "metadata.name",
            f"use at most {NAME_MAX_LENGTH} lower-case letters, digits and dashes, starting with a letter",
        )


def check_spec(spec: Spec) -> None:
    """Every rule, in the order of the fields."""
    _check_source(spec, spec.model.source, "spec.model.source")
    _check_cache(spec.model.source, spec.cache)
    check_access_mode(spec)
    if spec.cache is not None:
        _check_env("spec.cache.download.env", spec.cache.download.env)
    _check_speculation(spec.engine.speculation)
    _check_adapters_of_engine(spec)
    _check_adapters(spec)
    _check_chat_template(spec.engine.chat_template)
    _check_extra_args(spec.engine.extra_args)
    _check_env("spec.engine.env", spec.engine.env, names.ENV_FAULT)
    check_resources(spec.resources)
    _check_kv_cache(spec)
    _check_weight_offload(spec)
    _check_parallelism(spec)
    if spec.disaggregation is not None:
        _check_disaggregation(spec, spec.disaggregation)
    if spec.engine.enforce_eager and spec.resources.accelerator is None:
        raise SpecError("spec.engine.enforceEager", "only a GPU has graphs to do without: set resources.gpu")
    _check_arithmetic(spec)
    _check_limits_per_key(spec)
    _check_watermark(spec)
    check_autoscaling(spec)
    _check_sharing(spec)
    _check_task(spec)
    check_scheduling(spec.scheduling)
    _check_times(spec)
    _check_networking(spec)
    logging = spec.observability.request_logging
    if logging.redact_config_map_ref is not None and logging.mode != "Content":
        raise SpecError(
            "spec.observability.requestLogging.redactConfigMapRef",
            "nothing is logged that could be redacted: set mode to Content, or drop it",
        )
    if spec.rollout.max_surge == 0 and spec.rollout.max_unavailable == 0:
        raise SpecError(
            "spec.rollout", "no pod could ever be replaced: set maxSurge or maxUnavailable above 0"
        )
    if spec.rollout.strategy == "Surge" and spec.rollout.max_surge == 0:
        raise SpecError("spec.rollout.maxSurge", "set it above 0, or choose the strategy InPlace")


def _check_arithmetic(spec: Spec) -> None:
    """The server refuses it too, once it has a GPU."""
    prefill = None if spec.disaggregation is None else spec.disaggregation.prefill
    if spec.resources.accelerator is None and (prefill is None or not _runs_on_gpu(spec, prefill)):
        return
    remedy = "or drop resources.gpu and resources.profileRef: it is arithmetic of CPUs"
    if spec.engine.quantization not in ("Auto", "None"):
        raise SpecError("spec.engine.quantization", f"set it to Auto or None, {remedy}")
    if spec.engine.dtype == "Float32":
        raise SpecError("spec.engine.dtype", f"set it to Auto or BFloat16, {remedy}")


def check_adapter_names(adapters: Sequence[Adapter], served_names: Collection[str]) -> None:
    """A request names the model itself or one adapter. Raises SpecError."""
    given = [adapter.name for adapter in adapters]
    for index, name in enumerate(given):
        if name in given[:index]:
            raise SpecError(f"spec.adapters[{index}].name", f"{name} is given twice: drop one, or rename it")
        if name in served_names:
            raise SpecError(
                "spec.adapters",
                f"{name} is a name of the model itself (servedName, or else metadata.name, and aliases): "
                "choose another name for the adapter",
            )


def _check_source(spec: Spec, source: Source, field: str) -> None:
    """Exactly one source, and what each kind needs."""
    given = [item.name for item in fields(source) if getattr(source, item.name) is not None]
    if len(given) != 1:
        raise SpecError(field, "give exactly one of pvc, huggingFace, s3, gcs and oci")
    if source.pvc is not None:
        _check_path(f"{field}.pvc.path", source.pvc.path)
    _check_bucket_access(spec, source, field)
    _check_token(source.hugging_face, field)


def _check_cache(source: Source, cache: ModelCache | None) -> None:
    """A cache for a model that is downloaded."""
    if (source.pvc is not None) == (cache is not None):
        raise SpecError(
            "spec.cache",
            "set it beside a source that is downloaded (mode and size), and drop it beside a pvc",
        )
    if cache is None:
        return
    if bool(cache.size) == bool(cache.existing_claim):
        raise SpecError("spec.cache.size", "give it, or existingClaim: a claim that is there has its size")
    if cache.size and not 0 < quantity.parse(cache.size) <= quantity.parse(MAX_CACHE_SIZE):
        raise SpecError("spec.cache.size", f"give a positive quantity up to {MAX_CACHE_SIZE}, such as 20Gi")
    if cache.storage_class_name and (cache.mode == "None" or cache.existing_claim):
        raise SpecError("spec.cache.storageClassName", "drop it: no claim is made")
    if not cache.is_shared and (cache.access_mode or cache.existing_claim):
        raise SpecError("spec.cache", "set mode SharedPVC, or drop accessMode and existingClaim")


def _check_bucket_access(spec: Spec, source: Source, field: str) -> None:
    bucket = source.s3 or source.gcs
    if bucket is None:
        return
    has_identity = spec.security.identity.workload != "None"
    given = (bucket.credentials_secret_ref is not None, bucket.anonymous, has_identity)
    if sum(given) != 1:
        kind = "s3" if source.s3 is not None else "gcs"
        raise SpecError(
            f"{field}.{kind}",
            "give exactly one of credentialsSecretRef, anonymous: true and spec.security.identity.workload",
        )


def _check_token(hub: HuggingFace | None, field: str) -> None:
    if hub is not None and hub.token_secret_ref is not None and hub.endpoint.startswith("http://"):
        raise SpecError(
            f"{field}.huggingFace.endpoint",
            "a token goes over HTTPS only: write https://, or drop the token",
        )


def check_access_mode(spec: Spec) -> None:
    """A ReadWriteOnce claim allows one replica. Raises SpecError."""
    most = spec.replicas if spec.autoscaling is None else spec.autoscaling.max_replicas
    is_one = most <= 1 and spec.disaggregation is None
    if spec.cache is not None and spec.cache.access_mode == "ReadWriteOnce" and not is_one:
        raise SpecError(
            "spec.cache.accessMode", "set ReadWriteMany, or give one replica at most and no disaggregation"
        )


def _check_path(field: str, path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise SpecError(field, "give a path relative to the root of the volume, without '..'")


def _check_speculation(speculation: Speculation) -> None:
    field, path = "spec.engine.speculation.draftModelPath", speculation.draft_model_path
    if (speculation.method == "DraftModel") != bool(path):
        raise SpecError(field, "method DraftModel and draftModelPath need each other: set both, or neither")
    _check_path(field, path)


def _check_adapters_of_engine(spec: Spec) -> None:
    engine = spec.engine
    if engine.max_adapters is None:
        if engine.max_adapter_rank is not None or engine.adapters_path:
            raise SpecError(
                "spec.engine.maxAdapters",
                "without it there are no adapters: set it, or drop maxAdapterRank and adaptersPath",
            )
        return
    _check_path("spec.engine.adaptersPath", engine.adapters_path)
    if spec.disaggregation is not None or engine.weight_offload:
        raise SpecError(
            "spec.engine.maxAdapters",
            "adapters do not work with them: drop maxAdapters, or disaggregation and engine.weightOffload",
        )


def _check_adapters(spec: Spec) -> None:
    if spec.adapters and (spec.engine.max_adapters is None or spec.engine.adapters_path):
        raise SpecError(
            "spec.adapters",
            "they are downloaded to a directory of their own, and need places in the engine: set "
            "engine.maxAdapters and drop engine.adaptersPath",
        )
    for index, adapter in enumerate(spec.adapters):
        _check_source(spec, adapter.source, f"spec.adapters[{index}].source")


def _check_extra_args(arguments: Iterable[str]) -> None:
    for index, argument in enumerate(arguments):
        if not re.fullmatch(ARGUMENT_PATTERN, argument):
            raise SpecError(
                f"spec.engine.extraArgs[{index}]",
                f"{argument.partition('=')[0]!r:.80} cannot be set here: use the field of the LLMDeployment "
                f"instead; allowed are {', '.join(f'--{flag}' for flag in ALLOWED_FLAGS)}",
            )


def _check_chat_template(template: ChatTemplate | None) -> None:
    if template is None:
        return
    if (template.config_map_ref is None) == (not template.file):
        raise SpecError("spec.engine.chatTemplate", "give either configMapRef or file")


def _check_env(field: str, env: Sequence[EnvVar], allowed: str = "") -> None:
    env_names = [variable.name for variable in env]
    for index, name in enumerate(env_names):
        path = f"{field}[{index}].name"
        if re.fullmatch(RESERVED_ENV_PATTERN, name) and name != allowed:
            raise SpecError(path, f"{name} is reserved (QUIRE_*, LD_*, PYTHON*): use the fields of the spec")
        if name in env_names[:index]:
            raise SpecError(path, f"{name} is given twice")


def _check_limits_per_key(spec: Spec) -> None:
    engine = spec.engine
    for name, limit in (
        ("maxRequestsPerKey", engine.max_requests_per_key),
        ("maxRequestsPerMinutePerKey", engine.max_requests_per_minute_per_key),
        ("maxTokensPerMinutePerKey", engine.max_tokens_per_minute_per_key),
    ):
        if limit is not None and spec.security.api_keys_secret_ref is None:
            raise SpecError(
                f"spec.engine.{name}",
                "without keys all clients look the same: set security.apiKeysSecretRef, or drop this limit",
            )


def _check_watermark(spec: Spec) -> None:
    watermark = spec.engine.watermark
    if watermark.mode != "Off" and watermark.key_secret_ref is None:
        raise SpecError(
            "spec.engine.watermark.keySecretRef", "without a key there is no watermark: set it, or mode Off"
        )


def check_resources(resources: Resources) -> None:
    """spec.resources."""
    _check_cpu_and_memory(resources.cpu, resources.memory, "spec.resources")
    shared = resources.shared_memory
    if shared != AUTO and not 0 < quantity.parse(shared) < quantity.parse(resources.memory):
        raise SpecError(
            "spec.resources.sharedMemory", "counts against resources.memory: give less than that, or Auto"
        )
    if resources.gpu is not None and resources.profile_ref is not None:
        raise SpecError(
            "spec.resources.profileRef", "the profile says what nodes call the GPU: drop gpu, or profileRef"
        )


def _check_cpu_and_memory(cpu: str, memory: str, field: str) -> None:
    if not 0 < quantity.parse(cpu) <= quantity.parse(MAX_CPU):
        raise SpecError(f"{field}.cpu", f"give more than 0 and at most {MAX_CPU}, such as 500m or 4")
    if not quantity.parse(MIN_MEMORY) <= quantity.parse(memory) <= quantity.parse(MAX_MEMORY):
        raise SpecError(
            f"{field}.memory",
            f"give {MIN_MEMORY} to {MAX_MEMORY}, such as 4Gi (512m is half a byte; write 512Mi)",
        )


def check_scheduling(scheduling: Scheduling) -> None:
    """spec.scheduling."""
    check_label_keys(scheduling.node_selector, "spec.scheduling.nodeSelector")
    check_tolerations(scheduling.tolerations, "spec.scheduling.tolerations")


def check_tolerations(tolerations: Iterable[Toleration], path: str) -> None:
    """The API server's own rules for tolerations in a pod."""
    for index, toleration in enumerate(tolerations):
        _check_toleration(toleration, f"{path}[{index}]")


def check_label_keys(entries: Mapping[str, str], path: str) -> None:
    """Label keys."""
    for key in entries:
        if not re.fullmatch(LABEL_KEY, key):
            raise SpecError(path, f"{key!r:.80} is no label key: write name or domain/name")


def _check_toleration(toleration: Toleration, path: str) -> None:
    if toleration.operator == "Exists" and toleration.value:
        raise SpecError(path, "operator Exists matches every value: drop value, or use operator Equal")
    if toleration.operator == "Equal" and not toleration.key:
        raise SpecError(path, "without a key only operator Exists works: give a key, or use operator Exists")
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        raise SpecError(
            path, "tolerationSeconds works with effect NoExecute only: set it, or drop the seconds"
        )


def _check_kv_cache(spec: Spec) -> None:
    cache, memory = spec.engine.kv_cache, quantity.parse(spec.resources.memory)
    on_host = "" if spec.resources.accelerator is not None else cache.memory
    for field, size in (("memory", on_host), ("hostOffload", cache.host_offload)):
        if size and not 0 < quantity.parse(size) < memory:
            raise SpecError(
                f"spec.engine.kvCache.{field}",
                "the weights need room beside it: give more than 0 and less than resources.memory",
            )
    if cache.memory and not quantity.parse(cache.memory) > 0:
        raise SpecError("spec.engine.kvCache.memory", "give a positive quantity, such as 4Gi")
    together = sum(quantity.parse(size) for size in (on_host, cache.host_offload) if size)
    if cache.host_offload and together >= memory:
        raise SpecError(
            "spec.engine.kvCache.hostOffload",
            "the weights need room beside it and kvCache.memory: together give less than resources.memory",
        )
    if cache.disk_offload and not 0 < quantity.parse(cache.disk_offload) <= quantity.parse(MAX_DISK_OFFLOAD):
        raise SpecError(
            "spec.engine.kvCache.diskOffload",
            f"give a positive quantity up to {MAX_DISK_OFFLOAD}, such as 20Gi",
        )
    if cache.disk_offload and not cache.host_offload:
        raise SpecError(
            "spec.engine.kvCache.diskOffload", "blocks reach the disk through the host: set hostOffload too"
        )
    if cache.preemption_mode == "Swap" and not cache.host_offload:
        raise SpecError(
            "spec.engine.kvCache.preemptionMode", "Swap keeps blocks on the host: set hostOffload"
        )


def _check_weight_offload(spec: Spec) -> None:
    size, blocks = spec.engine.weight_offload, spec.engine.kv_cache.host_offload
    if not size:
        return
    if spec.resources.accelerator is None:
        raise SpecError(
            "spec.engine.weightOffload",
            "without a GPU all weights are in the host's memory: set resources.gpu",
        )
    together = sum(quantity.parse(each) for each in (size, blocks) if each)
    if not quantity.parse(size) > 0 or together >= quantity.parse(spec.resources.memory):
        raise SpecError(
            "spec.engine.weightOffload",
            "give more than 0, and together with kvCache.hostOffload less than resources.memory",
        )


def _check_parallelism(spec: Spec) -> None:
    """What several ranks need, and what they cannot do yet."""
    field, ranks, nodes = "spec.parallelism", spec.parallelism.ranks, spec.parallelism.nodes
    if ranks % nodes:
        raise SpecError(
            "spec.parallelism.nodes",
            "every node runs as many ranks: choose a number that divides tensor times pipeline",
        )
    if ranks == 1:
        return
    if ranks > MAX_RANKS:
        raise SpecError(field, f"a replica has {MAX_RANKS} ranks at most: lower tensor or pipeline")
    _check_nodes(spec)
    # A rank that gets no CPU for seconds would be given up by the others.
    if 2 * quantity.parse(spec.resources.cpu) < spec.parallelism.ranks_per_pod:
        raise SpecError(
            field, "every rank needs half a CPU, better a whole one: lower this, or raise resources.cpu"
        )


def _check_nodes(spec: Spec) -> None:
    """What a group of pods, which LeaderWorkerSet replaces as one, cannot have."""
    field = "spec.parallelism.nodes"
    if spec.parallelism.nodes == 1:
        return
    if spec.cache is not None and spec.cache.access_mode == "ReadWriteOnce":
        raise SpecError(field, "a ReadWriteOnce volume is on one node: drop this, or choose ReadWriteMany")
    if spec.rollout.strategy not in ("Auto", "InPlace"):
        raise SpecError(field, "groups are replaced in place: drop this, or choose rollout.strategy InPlace")
    if spec.rollout.min_ready_seconds:
        raise SpecError(field, "groups know no such time: drop this, or rollout.minReadySeconds")


def _check_disaggregation(spec: Spec, roles: Disaggregation) -> None:
    """What two roles need, and what cannot be exchanged between their pods yet."""
    field, engine, prefill = "spec.disaggregation", spec.engine, roles.prefill
    on_gpu = [_runs_on_gpu(spec, role) for role in (prefill, roles.decode)]
    if len(set(on_gpu)) > 1:
        raise SpecError(
            field,
            "KV blocks of a GPU and of a CPU differ in format: give both roles a GPU, by spec.resources or "
            "each its own, or none",
        )
    if spec.parallelism.nodes > 1:
        raise SpecError(
            field, "all ranks of its pods are on one node so far: drop parallelism.nodes, or this"
        )
    if not engine.prefix_caching:
        raise SpecError(field, "decode pods need their prefix cache: set engine.prefixCaching, or drop this")
    if engine.kv_cache.host_offload or engine.speculation.method == "DraftModel":
        raise SpecError(
            field, "other tiers and draft models exclude it so far: drop engine.kvCache.hostOffload and those"
        )
    if roles.decode.replicas is not None and (spec.autoscaling is not None or spec.replicas != 1):
        raise SpecError(
            f"{field}.decode.replicas", "only one can say how many there are: drop it, or spec.replicas"
        )
    scaling = spec.autoscaling
    if scaling is not None and (scaling.idle is not None or scaling.min_replicas == 0):
        raise SpecError(
            field,
            "prefill pods would run on while it is idle: drop autoscaling.idle, set minReplicas above 0, or "
            "drop this",
        )
    if roles.transport == "NIXL" and spec.networking.network_policy.mode == "None":
        raise SpecError(
            f"{field}.transport", "NIXL has no authentication: set networking.networkPolicy.mode Restricted"
        )
    if prefill.autoscaling is not None:
        _check_prefill_autoscaling(prefill, prefill.autoscaling)
    for name, role in (("prefill", prefill), ("decode", roles.decode)):
        if role.resources is not None:
            _check_role_resources(spec, role.resources, f"{field}.{name}.resources", on_gpu=any(on_gpu))
        _check_ranks_of_role(spec, role, f"{field}.{name}")
        if any(on_gpu):
            _check_staging(spec, roles, role)
    if not 0 < quantity.parse(roles.staging_memory) <= quantity.parse(MAX_MEMORY):
        raise SpecError(f"{field}.stagingMemory", f"give a positive quantity up to {MAX_MEMORY}, such as 4Gi")
    if not any(on_gpu) and roles.staging_memory != Disaggregation.staging_memory:
        raise SpecError(
            f"{field}.stagingMemory", "blocks of CPUs are read where they are: drop it, or set resources.gpu"
        )


def _runs_on_gpu(spec: Spec, role: Prefill | Decode) -> bool:
    own = None if role.resources is None else role.resources.accelerator
    return (own or spec.resources.accelerator) is not None


def _check_staging(spec: Spec, roles: Disaggregation, role: Prefill | Decode) -> None:
    """What KV blocks go through between a GPU and the network is part of a pod's memory."""
    taken = [roles.staging_memory, *([spec.engine.weight_offload] if spec.engine.weight_offload else [])]
    memory = (role.resources or spec.resources).memory
    if sum(map(quantity.parse, taken)) >= quantity.parse(memory):
        raise SpecError(
            "spec.disaggregation",
            "stagingMemory, and engine.weightOffload if it is set, are part of each pod's memory: lower "
            "them, or raise the memory of both roles",
        )


def _check_prefill_autoscaling(prefill: Prefill, scaling: PrefillAutoscaling) -> None:
    field = "spec.disaggregation.prefill.autoscaling"
    if prefill.replicas != 1:
        raise SpecError(field, "only one can say how many prefill pods there are: drop this, or replicas")
    if scaling.min_replicas > scaling.max_replicas:
        raise SpecError(f"{field}.minReplicas", "above maxReplicas: lower it, or raise maxReplicas")


def _check_ranks_of_role(spec: Spec, role: Prefill | Decode, field: str) -> None:
    """The rules of `spec.parallelism`, for the ranks and the CPU that a role has."""
    sizes = role.parallelism or spec.parallelism
    ranks = sizes.tensor * sizes.pipeline
    if ranks > MAX_RANKS:
        message = f"a pod has {MAX_RANKS} ranks at most: lower tensor or pipeline"
        raise SpecError(f"{field}.parallelism", message)
    if ranks > 1 and 2 * quantity.parse((role.resources or spec.resources).cpu) < ranks:
        raise SpecError(
            field, "every rank needs half a CPU, better a whole one: lower parallelism, or raise cpu"
        )


def _check_role_resources(spec: Spec, own: RoleResources, field: str, *, on_gpu: bool) -> None:
    """The rules of `spec.resources`, for a role's own."""
    _check_cpu_and_memory(own.cpu, own.memory, field)
    if own.gpu is not None and own.profile_ref is not None:
        raise SpecError(
            f"{field}.profileRef", "the profile says what nodes call the GPU: drop gpu, or profileRef"
        )
    on_host = "" if on_gpu else spec.engine.kv_cache.memory
    for size in (on_host, spec.resources.shared_memory):
        if size and size != AUTO and quantity.parse(size) >= quantity.parse(own.memory):
            raise SpecError(
                f"{field}.memory",
                "above engine.kvCache.memory and resources.sharedMemory, which are part of it: raise it",
            )


def check_autoscaling(spec: Spec) -> None:
    """Every rule, in the order of the fields."""
    scaling = spec.autoscaling
    if scaling is None:
        return
    if spec.replicas != 1:  # the default, which the API server writes out, counts as absent
        raise SpecError(
            "spec.autoscaling", "only one can say how many pods there are: drop this, or spec.replicas"
        )
    if scaling.min_replicas > scaling.max_replicas:
        raise SpecError(
            "spec.autoscaling.minReplicas",
            "above maxReplicas: lower it, or raise spec.autoscaling.maxReplicas",
        )
    _check_metrics(scaling, has_gpu=spec.resources.accelerator is not None)
    _check_keda(scaling)


def _check_metrics(scaling: Autoscaling, *, has_gpu: bool) -> None:
    types = [metric.type for metric in scaling.metrics]
    for index, metric in enumerate(scaling.metrics):
        path = f"spec.autoscaling.metrics[{index}]"
        if metric.type in types[:index]:
            raise SpecError(f"{path}.type", f"{metric.type} is given twice")
        if metric.type in names.SHARES and (metric.target_per_replica or 0) > 100:
            raise SpecError(f"{path}.targetPerReplica", f"{metric.type} is a percentage: give 100 at most")
        if metric.type == "GPUUtilization" and not has_gpu:
            raise SpecError(f"{path}.type", "without a GPU nothing reports it: set resources.gpu, or drop it")


def needs_keda(scaling: Autoscaling) -> bool:
    """Whether nothing but KEDA does what is asked for."""
    has_activator = scaling.idle is not None and scaling.idle.activator is not None
    return has_activator or scaling.fallback is not None


def _check_keda(scaling: Autoscaling) -> None:
    if needs_keda(scaling) and scaling.backend not in ("Auto", "KEDA"):
        field = "fallback" if scaling.fallback is not None else "idle.activator"
        raise SpecError(
            f"spec.autoscaling.{field}", "only KEDA can do that: set backend to Auto or KEDA, or drop it"
        )
    is_idling = scaling.idle is not None or scaling.min_replicas == 0
    if is_idling and scaling.backend == "External":
        field = "minReplicas" if scaling.min_replicas == 0 else "idle"
        raise SpecError(
            f"spec.autoscaling.{field}",
            "with backend External nothing of Quire stops pods: set backend to Auto, or drop this",
        )
    counted = {metric.type for metric in scaling.metrics}
    uses_keda = scaling.backend == "KEDA" or needs_keda(scaling)
    if is_idling and uses_keda and counted and "RunningRequests" not in counted:
        raise SpecError(
            "spec.autoscaling.metrics",
            "give RunningRequests too: without it KEDA would count a replica that answers as idle",
        )


def _check_sharing(spec: Spec) -> None:
    """What deployments cannot have of which one runs at a time, with one pod."""
    field = "spec.sharing"
    if spec.sharing is None:
        return
    if spec.autoscaling is not None or spec.replicas > 1:
        raise SpecError(
            field, "one pod of the pool runs at a time: drop replicas and autoscaling, or drop this"
        )
    if spec.disaggregation is not None:
        raise SpecError(field, "two kinds of pods need two accelerators: drop disaggregation, or drop this")
    if spec.parallelism.nodes > 1:
        raise SpecError(
            field, "what is shared are the accelerators of one pod: drop parallelism.nodes, or drop this"
        )
    if spec.rollout.strategy not in ("Auto", "Recreate"):
        raise SpecError(
            field,
            "a pod starts when the one before it is gone: set rollout.strategy to Auto or Recreate, or drop "
            "this",
        )
    if spec.rollout.auto_rollback:
        raise SpecError(
            field,
            "a change that waits for its turn has not failed yet: drop rollout.autoRollback, or drop this",
        )


def _check_task(spec: Spec) -> None:
    """What a model that embeds texts does not have."""
    engine = spec.engine
    if spec.task == "Generate":
        if engine.pooling != "Auto":
            raise SpecError(
                "spec.engine.pooling",
                "a model that generates text pools no states: set task Embed, or drop it",
            )
        return
    if spec.disaggregation is not None:
        raise SpecError(
            "spec.disaggregation", "a vector has a prefill and no decode: drop it, or set task Generate"
        )
    if spec.parallelism.tensor * spec.parallelism.pipeline > 1:
        raise SpecError(
            "spec.parallelism", "a model that embeds texts runs on one rank: drop it, or set task Generate"
        )
    cache = engine.kv_cache
    if cache.memory or cache.block_size or cache.host_offload or cache.disk_offload or cache.dtype != "Auto":
        raise SpecError(
            "spec.engine.kvCache",
            "a model that embeds texts keeps no KV cache: drop it, or set task Generate",
        )
    for name, is_set in (
        ("speculation", engine.speculation.method != "None"),
        ("watermark", engine.watermark.mode != "Off"),
        ("chatTemplate", engine.chat_template is not None),
        ("toolCallParser", engine.tool_call_parser != "Auto"),
        ("reasoningParser", engine.reasoning_parser != "Auto"),
        ("weightOffload", bool(engine.weight_offload)),
        ("maxAdapters", engine.max_adapters is not None),
    ):
        if is_set:
            raise SpecError(
                f"spec.engine.{name}",
                "a model that embeds texts writes no answers: drop it, or set task Generate",
            )


def _check_times(spec: Spec) -> None:
    if spec.health.load_stall_timeout_seconds > spec.health.startup_timeout_seconds:
        raise SpecError(
            "spec.health",
            "loadStallTimeoutSeconds is never reached: keep it within startupTimeoutSeconds",
        )
    if spec.drain.pre_stop_seconds + (spec.drain.timeout_seconds or 0) > 3600:
        raise SpecError("spec.drain", "preStopSeconds and timeoutSeconds together may take 3600 at most")


def _check_networking(spec: Spec) -> None:
    path = "spec.networking.service.annotations"
    for key in spec.networking.service.annotations:
        if key.startswith(f"{names.GROUP}/") or not re.fullmatch(LABEL_KEY, key):
            raise SpecError(path, f"{key!r:.80} cannot be used: write domain/name, not under {names.GROUP}/")
    for index, peer in enumerate(spec.networking.network_policy.allow_from):
        _check_peer(peer, f"spec.networking.networkPolicy.allowFrom[{index}]")
    _check_http_route(spec.networking.http_route)


def _check_peer(peer: Peer, path: str) -> None:
    selects = peer.namespace_selector is not None or peer.pod_selector is not None
    if selects == (peer.ip_block is not None):
        raise SpecError(path, "give either ipBlock, or namespaceSelector and/or podSelector")
    if peer.ip_block is not None:
        try:
            ipaddress.ip_network(peer.ip_block.cidr)
        except ValueError as error:
            raise SpecError(f"{path}.ipBlock.cidr", f"{error}: write for example 10.0.0.0/8") from error
    for name, selector in (
        ("namespaceSelector", peer.namespace_selector),
        ("podSelector", peer.pod_selector),
    ):
        if selector is not None:
            _check_selector(selector, f"{path}.{name}")


def _check_selector(selector: LabelSelector, path: str) -> None:
    check_label_keys(selector.match_labels, f"{path}.matchLabels")
    for index, requirement in enumerate(selector.match_expressions):
        if (requirement.operator in ("In", "NotIn")) != bool(requirement.values):
            raise SpecError(
                f"{path}.matchExpressions[{index}]",
                "operators In and NotIn need values, Exists and DoesNotExist take none",
            )


def _check_http_route(route: Route | None) -> None:
    """The Gateway API allows two references to one Gateway only with different listeners; here one is
    allowed.
    """
    if route is None:
        return
    known = [(parent.name, parent.namespace) for parent in route.parent_refs]
    if not known or len(set(known)) < len(known):
        raise SpecError("spec.networking.httpRoute.parentRefs", "give each Gateway once, and at least one")
