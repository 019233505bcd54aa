"""The ConfigMap: the server's settings as environment variables, immutable and named after a hash of its
content.

A change gives another name, so another pod template and a rollout. The old ConfigMap is kept while a
ReplicaSet refers to it, so that a rollback finds its settings. Knows the server's variables, not its parser.
"""

from __future__ import annotations

import hashlib
import json

from quire_operator import names, quantity
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment
from quire_operator.spec.schema import Disaggregation, Engine, Parallelism, Watermark

_HASH_LENGTH = 10

_PATH_REDACT = f"{names.PATH_LOG_REDACT}/patterns"
_METHODS = {"None": "", "NGram": "ngram", "DraftModel": "draft-model"}


def build(model: LLMDeployment, settings: Settings) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(model, _name(model, settings)),
        "immutable": True,
        "data": _data(model, settings),
    }


def _name(model: LLMDeployment, settings: Settings) -> str:
    """The LLMDeployment's name and a hash of the data."""
    content = json.dumps(_data(model, settings), sort_keys=True).encode()
    return f"{model.name}-{hashlib.sha256(content).hexdigest()[:_HASH_LENGTH]}"


def _data(model: LLMDeployment, settings: Settings) -> dict[str, str]:
    """What the spec, or the administrator for it, sets or defaults; the server decides the rest."""
    engine, health, drain = model.spec.engine, model.spec.health, model.spec.drain
    gpu = model.spec.resources.accelerator
    tracing, logging = model.spec.observability.tracing, model.spec.observability.request_logging
    drafts, draft_path = _METHODS[engine.speculation.method], engine.speculation.draft_model_path
    return compact(
        {
            "QUIRE_AUTH_KEY_DIR": names.PATH_AUTH_KEY if model.spec.parallelism.auth_secret_ref else "",
            "QUIRE_API_KEYS_DIR": names.PATH_API_KEYS if model.spec.security.api_keys_secret_ref else "",
            "QUIRE_BLOCK_SIZE": _number(engine.kv_cache.block_size),
            "QUIRE_CANARY_GOLDEN_PATH": f"{names.PATH_GOLDEN_TOKENS}/{names.GOLDEN_TOKENS_FILE}",
            "QUIRE_CANARY_INTERVAL_SECONDS": _number(health.canary_interval_seconds),
            "QUIRE_CHAT_TEMPLATE": _chat_template(model),
            "QUIRE_CPU_OFFLOAD_GB": _gibibytes(engine.weight_offload),
            "QUIRE_DEVICE": "cpu" if gpu is None else "cuda",
            "QUIRE_DRAIN_TIMEOUT_SECONDS": _number(model.drain_timeout_seconds),
            "QUIRE_DTYPE": engine.dtype.lower(),
            "QUIRE_ENABLE_CHUNKED_PREFILL": _boolean(engine.chunked_prefill),
            "QUIRE_ENABLE_PREFIX_CACHING": _boolean(engine.prefix_caching),
            "QUIRE_ENFORCE_EAGER": _boolean(engine.enforce_eager) if gpu is not None else "",
            **_gateway(model, settings),
            "QUIRE_GENERATION_CONFIG": engine.generation_config.lower(),
            "QUIRE_GPU_MEMORY_UTILIZATION": f"{gpu.memory_percent / 100:g}" if gpu is not None else "",
            "QUIRE_HOST": "0.0.0.0",
            "QUIRE_KV_CACHE_DTYPE": engine.kv_cache.dtype.lower(),
            "QUIRE_KV_CACHE_MEMORY_BYTES": _bytes(engine.kv_cache.memory),
            **_kv_role(model),
            "QUIRE_KV_OFFLOAD_DISK_BYTES": _bytes(engine.kv_cache.disk_offload),
            "QUIRE_KV_OFFLOAD_DISK_PATH": names.PATH_KV_OFFLOAD if engine.kv_cache.disk_offload else "",
            "QUIRE_KV_OFFLOAD_HOST_BYTES": _bytes(engine.kv_cache.host_offload),
            "QUIRE_LOAD_STALL_TIMEOUT_SECONDS": _number(health.load_stall_timeout_seconds),
            "QUIRE_LOG_REDACT_PATH": _PATH_REDACT if logging.redact_config_map_ref else "",
            "QUIRE_LOG_REQUESTS": logging.mode.lower(),
            "QUIRE_MAX_LOG_LEN": _number(logging.max_characters),
            "QUIRE_MAX_MODEL_LEN": _number(engine.max_model_len),
            "QUIRE_MAX_NUM_QUEUED_REQS": _number(engine.max_queue_length),
            "QUIRE_MAX_NUM_QUEUED_TOKENS": _number(engine.max_queued_tokens),
            "QUIRE_MAX_NUM_REQS_PER_KEY": _number(engine.max_requests_per_key),
            "QUIRE_MAX_NUM_SEQS": _number(engine.max_num_seqs),
            "QUIRE_MAX_REQUESTS_PER_MINUTE_PER_KEY": _number(engine.max_requests_per_minute_per_key),
            "QUIRE_MAX_TOKENS_PER_MINUTE_PER_KEY": _number(engine.max_tokens_per_minute_per_key),
            "QUIRE_NUM_SPECULATIVE_TOKENS": _number(engine.speculation.num_tokens) if drafts else "",
            "QUIRE_OTLP_ENDPOINT": tracing.endpoint,
            "QUIRE_PREEMPTION_MODE": engine.kv_cache.preemption_mode.lower(),
            "QUIRE_PRE_STOP_SECONDS": _number(drain.pre_stop_seconds),
            "QUIRE_QUANTIZATION": engine.quantization.lower(),
            "QUIRE_REQUEST_TIMEOUT_SECONDS": _number(engine.request_timeout_seconds),
            "QUIRE_SCHEDULING_POLICY": engine.scheduling_policy.lower(),
            "QUIRE_SERVED_MODEL_NAME": ",".join(model.served_names),
            "QUIRE_SPECULATIVE_METHOD": drafts,
            "QUIRE_SPECULATIVE_MODEL": names.model_path(draft_path) if draft_path else "",
            "QUIRE_STALL_TIMEOUT_SECONDS": _number(health.stall_timeout_seconds),
            "QUIRE_STARTUP_TIMEOUT_SECONDS": _number(health.startup_timeout_seconds),
            **_parallelism(model.spec.parallelism),
            **(_adapters(model) | _task(model)),
            **_watermark(engine.watermark),
            "QUIRE_TRACE_SAMPLE_RATIO": _ratio(tracing.sampling_rate_per_million) if tracing.endpoint else "",
        }
    )


def _gateway(model: LLMDeployment, settings: Settings) -> dict[str, str]:
    """Whose signed requests are served, where there is a gateway."""
    if not settings.gateway_keys(model.namespace):
        return {}
    return {
        "QUIRE_GATEWAY_AUDIENCE": f"{model.namespace}/{model.name}",
        "QUIRE_GATEWAY_KEYS_DIR": names.PATH_GATEWAY_KEYS,
    }


def _kv_role(model: LLMDeployment) -> dict[str, str]:
    """The server's part in transfers of KV blocks; empty where a pod does both prefill and decode."""
    roles = model.spec.disaggregation
    if roles is None:
        return {}
    if model.role == names.ROLE_PREFILL:
        return {
            "QUIRE_KV_LEASE_SECONDS": _number(roles.lease_seconds),
            "QUIRE_KV_ROLE": "kv_producer",
            **_staging(model, roles),
            "QUIRE_KV_TRANSFER_PORT": _number(names.PORT_KV_TRANSFER),
            **_transport(roles),
        }
    producers = names.workload(model.name, names.ROLE_PREFILL)  # a Service of the same namespace
    return {
        "QUIRE_KV_PRODUCERS": f"{producers}:{names.PORT_KV_TRANSFER}",
        "QUIRE_KV_ROLE": "kv_consumer",
        **_staging(model, roles),
        "QUIRE_LOCAL_PREFILL_BELOW_TOKENS": _number(roles.local_prefill_below_tokens),
        **_transport(roles),
    }


def _staging(model: LLMDeployment, roles: Disaggregation) -> dict[str, str]:
    """Of a GPU: the KV cache of a CPU is in the host's memory itself."""
    if model.spec.resources.accelerator is None:
        return {}
    return {"QUIRE_KV_STAGING_BYTES": _bytes(roles.staging_memory)}


def _transport(roles: Disaggregation) -> dict[str, str]:
    """Auto renders as nothing, so that pods of earlier versions are not replaced. NIXL gets the ports that
    the NetworkPolicy opens: UCX would take any.
    """
    if roles.transport == "Auto":
        return {}
    ports = {"UCX_TCP_PORT_RANGE": "-".join(map(str, names.PORTS_NIXL))} if roles.transport == "NIXL" else {}
    return {"QUIRE_KV_TRANSPORT": roles.transport.lower(), **ports}


def _chat_template(model: LLMDeployment) -> str:
    template = model.spec.engine.chat_template
    if template is None:
        return ""
    if template.config_map_ref is not None:
        return f"{names.PATH_CHAT_TEMPLATE}/{names.CHAT_TEMPLATE_FILE}"
    return f"{names.model_path(model.model_dir)}/{template.file}"


def _adapters(model: LLMDeployment) -> dict[str, str]:
    """Where the server has places for LoRA adapters, and what it may load: what the sidecar downloads, or a
    directory of the model's volume.
    """
    engine = model.spec.engine
    directory = names.model_path(engine.adapters_path) if engine.adapters_path else ""
    return {
        "QUIRE_ADAPTERS_DIR": names.PATH_ADAPTERS if model.follows_adapters else directory,
        "QUIRE_MAX_ADAPTERS": _number(engine.max_adapters),
        "QUIRE_MAX_ADAPTER_RANK": _number(engine.max_adapter_rank),
    }


def _parsers(engine: Engine) -> dict[str, str]:
    """Auto renders as nothing, so that pods of earlier versions are not replaced."""
    names = {
        "QUIRE_REASONING_PARSER": engine.reasoning_parser,
        "QUIRE_TOOL_CALL_PARSER": engine.tool_call_parser,
    }
    return {key: "" if name == "Auto" else name.lower() for key, name in names.items()}


def _task(model: LLMDeployment) -> dict[str, str]:
    """What a model is for. Generate renders its parsers alone, so that pods of earlier versions are not
    replaced.
    """
    if model.spec.task == "Generate":
        return _parsers(model.spec.engine)
    pooling = model.spec.engine.pooling
    return {"QUIRE_POOLING": "" if pooling == "Auto" else pooling.lower(), "QUIRE_TASK": "embed"}


def _parallelism(sizes: Parallelism) -> dict[str, str]:
    """One rank renders as nothing, so that pods of earlier versions are not replaced."""
    return {
        "QUIRE_NODES": _number(sizes.nodes) if sizes.nodes > 1 else "",
        "QUIRE_PIPELINE_PARALLEL_SIZE": _number(sizes.pipeline) if sizes.pipeline > 1 else "",
        "QUIRE_TENSOR_PARALLEL_SIZE": _number(sizes.tensor) if sizes.tensor > 1 else "",
    }


def _watermark(watermark: Watermark) -> dict[str, str]:
    """Only the named key is mounted, none of the Secret's other entries."""
    if watermark.mode == "Off" or watermark.key_secret_ref is None:
        return {}
    mode = {"OnRequest": "on-request", "Always": "always"}[watermark.mode]
    path = f"{names.PATH_WATERMARK}/{watermark.key_secret_ref.key}"
    return {"QUIRE_WATERMARK": mode, "QUIRE_WATERMARK_KEY_PATH": path}


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _ratio(per_million: int) -> str:
    return f"{per_million / 1_000_000:g}"


def _bytes(value: str) -> str:
    return _number(quantity.whole_bytes(value) if value else None)


def _gibibytes(value: str) -> str:
    return f"{quantity.whole_bytes(value) / (1 << 30):.12g}" if value else ""


def _boolean(value: bool) -> str:
    return "true" if value else "false"
