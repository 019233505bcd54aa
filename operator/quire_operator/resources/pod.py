"""The pod template of a model server: command line, environment, probes, drain, volumes, security.

The server's command line parser accepts what is written here (tests/contracts check that). User input never
reaches a shell or a template: each text is one element of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator import names
from quire_operator.resources import environment, placement, rank_environment
from quire_operator.resources.manifest import RESTRICTED_CONTAINER, Manifest, compact, literal
from quire_operator.settings import Settings
from quire_operator.spec import LLMDeployment, Profile
from quire_operator.spec.schema import AUTO, ConfigMapKeyRef, Spec

_SHARED_MEMORY_AUTO, _SHARED_MEMORY_GPUS = "64Mi", "1Gi"
_SCRATCH_SIZE = "1Gi"
# Beyond the startup time: the supervisor ends a late start itself with a reason; the kubelet is the backstop.
_STARTUP_SPARE_FAILURES = 6
# A hung engine has nothing to drain, so a failed liveness probe does not wait for the drain time.
_LIVENESS_GRACE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What all pods of an LLMDeployment have in common. `config_map`: name of the ConfigMap with the server's
    environment; `model_files` and `adapters`: from the modules of these names; `profile`: the
    AcceleratorProfile that the spec names, if any.
    """

    config_map: str
    model_files: Mapping[str, Any]
    adapters: Mapping[str, Any]
    profile: Profile | None


def build(
    model: LLMDeployment, settings: Settings, parts: Parts, *, role: str = names.ROLE_LEADER
) -> Manifest:
    """The pod template. `role`: pods that clients talk to are leaders, also where they have no workers."""
    model_parts, profile = parts.model_files, parts.profile
    init_containers = [*model_parts["initContainers"], *parts.adapters["initContainers"]]
    annotations = compact({names.ANNOTATION_RESTART_ID: model.spec.rollout.restart_id})
    if model.spec.disruption.protect_while_loading:
        annotations |= names.PROTECT_WHILE_LOADING
    labels = names.child_labels(model.name) | {names.LABEL_ROLE: role}
    if model.spec.sharing is not None:
        labels |= {names.LABEL_POOL: model.spec.sharing.pool}
    if init_containers:  # only downloads use the identity
        labels |= model.identity_labels
    return {
        "metadata": compact({"labels": labels, "annotations": annotations}),
        "spec": {
            "serviceAccountName": model.service_account_name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": model.termination_grace_period_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": names.USER_ID,
                "runAsGroup": names.USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
                **model_parts["securityContext"],
            },
            **compact({"imagePullSecrets": [{"name": name} for name in settings.engine_image_pull_secrets]}),
            **placement.build(model, profile),
            **compact({"initContainers": init_containers}),
            "containers": [_container(model, settings, parts, role)],
            "volumes": [*model_parts["volumes"], *_volumes(model, settings), *parts.adapters["volumes"]],
        },
    }


def _container(model: LLMDeployment, settings: Settings, parts: Parts, role: str) -> Manifest:
    resources = model.spec.resources
    env = [*rank_environment.build(model), *environment.of_server(model.spec.engine.env, settings)]
    return {
        "name": names.CONTAINER,
        "image": settings.engine_image,
        "imagePullPolicy": settings.engine_image_pull_policy,
        "args": [
            "serve",
            literal(names.model_path(model.model_dir)),
            *(literal(argument) for argument in model.spec.engine.extra_args),
        ],
        "envFrom": [{"configMapRef": {"name": parts.config_map}}],
        **compact({"env": env, "lifecycle": _lifecycle(model, role)}),
        "ports": _ports(model, role),
        **_probes(model),
        # No CPU limit: throttling costs latency and saves nothing. Memory limit and request are equal, so
        # that it is guaranteed.
        "resources": {
            "requests": compact(
                {
                    "cpu": resources.cpu,
                    "memory": resources.memory,
                    "ephemeral-storage": model.spec.engine.kv_cache.disk_offload,
                }
            ),
            "limits": {"memory": resources.memory, **placement.devices(model.spec, parts.profile)},
        },
        **RESTRICTED_CONTAINER,
        "volumeMounts": [*_volume_mounts(model, settings), *parts.adapters["volumeMounts"]],
    }


def _lifecycle(model: LLMDeployment, role: str) -> Manifest:
    """Time until no new request comes any more; to a worker none ever comes."""
    seconds = model.spec.drain.pre_stop_seconds
    return {"preStop": {"sleep": {"seconds": seconds}}} if seconds and role != names.ROLE_WORKER else {}


def _ports(model: LLMDeployment, role: str) -> list[Manifest]:
    is_leader = role == names.ROLE_LEADER
    ports = {
        **({names.PORT_HTTP_NAME: names.PORT_HTTP} if role != names.ROLE_WORKER else {}),
        names.PORT_HEALTH_NAME: names.PORT_HEALTH,
        **({names.PORT_RANKS_NAME: names.PORT_RANKS} if model.is_grouped and is_leader else {}),
        **({names.PORT_KV_TRANSFER_NAME: names.PORT_KV_TRANSFER} if role == names.ROLE_PREFILL else {}),
    }
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _probes(model: LLMDeployment) -> dict[str, Any]:
    health = model.spec.health
    startup, readiness, liveness = health.probes.startup, health.probes.readiness, health.probes.liveness
    periods = -(-health.startup_timeout_seconds // startup.period_seconds)
    return {
        "startupProbe": {
            "httpGet": {"path": "/startupz", "port": names.PORT_HEALTH_NAME},
            "periodSeconds": startup.period_seconds,
            "timeoutSeconds": startup.timeout_seconds,
            "failureThreshold": periods + _STARTUP_SPARE_FAILURES,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": names.PORT_HEALTH_NAME},
            "periodSeconds": readiness.period_seconds,
            "timeoutSeconds": readiness.timeout_seconds,
            "failureThreshold": readiness.failure_threshold,
        },
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": names.PORT_HEALTH_NAME},
            "periodSeconds": liveness.period_seconds,
            "timeoutSeconds": liveness.timeout_seconds,
            "failureThreshold": liveness.failure_threshold,
            "terminationGracePeriodSeconds": _LIVENESS_GRACE_SECONDS,
        },
    }


def _volume_mounts(model: LLMDeployment, settings: Settings) -> list[dict[str, Any]]:
    keys = {"name": "api-keys", "mountPath": names.PATH_API_KEYS, "readOnly": True}
    auth = {"name": "auth-key", "mountPath": names.PATH_AUTH_KEY, "readOnly": True}
    gateway = {"name": "gateway-keys", "mountPath": names.PATH_GATEWAY_KEYS, "readOnly": True}
    template = {"name": "chat-template", "mountPath": names.PATH_CHAT_TEMPLATE, "readOnly": True}
    watermark = {"name": "watermark", "mountPath": names.PATH_WATERMARK, "readOnly": True}
    offload = {"name": "kv-offload", "mountPath": names.PATH_KV_OFFLOAD}
    redact = {"name": "log-redact", "mountPath": names.PATH_LOG_REDACT, "readOnly": True}
    golden = {"name": "golden-tokens", "mountPath": names.PATH_GOLDEN_TOKENS, "readOnly": True}
    return [
        {"name": "model", "mountPath": names.PATH_MODELS, "readOnly": True},
        golden,
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "home", "mountPath": names.PATH_HOME},
        {"name": "shared-memory", "mountPath": names.PATH_SHARED_MEMORY},
        *([offload] if model.spec.engine.kv_cache.disk_offload else []),
        *([keys] if model.spec.security.api_keys_secret_ref else []),
        *([auth] if model.spec.parallelism.auth_secret_ref else []),
        *([gateway] if settings.gateway_keys(model.namespace) else []),
        *([template] if _chat_template(model) else []),
        *([watermark] if model.spec.engine.watermark.mode != "Off" else []),
        *([redact] if model.spec.observability.request_logging.redact_config_map_ref else []),
    ]


def _volumes(model: LLMDeployment, settings: Settings) -> list[dict[str, Any]]:
    shared = model.spec.resources.shared_memory
    golden = {"name": names.golden_tokens(model.name), "optional": True}
    volumes: list[dict[str, Any]] = [
        {"name": "golden-tokens", "configMap": golden},
        {"name": "tmp", "emptyDir": {"sizeLimit": _SCRATCH_SIZE}},
        {"name": "home", "emptyDir": {"sizeLimit": _SCRATCH_SIZE}},
        {
            "name": "shared-memory",
            "emptyDir": {
                "medium": "Memory",
                "sizeLimit": _shared_memory(model.spec) if shared == AUTO else shared,
            },
        },
    ]
    if size := model.spec.engine.kv_cache.disk_offload:
        volumes.append({"name": "kv-offload", "emptyDir": {"sizeLimit": size}})
    if model.spec.security.api_keys_secret_ref:
        name = model.spec.security.api_keys_secret_ref.name
        volumes.append({"name": "api-keys", "secret": {"secretName": name}})
    if ref := model.spec.parallelism.auth_secret_ref:
        volumes.append({"name": "auth-key", "secret": {"secretName": ref.name}})
    if keys := settings.gateway_keys(model.namespace):
        # Of the chart, and public. Without it pods start and serve no request: none can be checked.
        volumes.append({"name": "gateway-keys", "configMap": {"name": keys, "optional": True}})
    if entry := _chat_template(model):
        items = [{"key": entry.key, "path": names.CHAT_TEMPLATE_FILE}]
        volumes.append({"name": "chat-template", "configMap": {"name": entry.name, "items": items}})
    reference = model.spec.engine.watermark.key_secret_ref
    if reference is not None and model.spec.engine.watermark.mode != "Off":
        items = [{"key": reference.key, "path": reference.key}]
        volumes.append({"name": "watermark", "secret": {"secretName": reference.name, "items": items}})
    if ref := model.spec.observability.request_logging.redact_config_map_ref:
        volumes.append({"name": "log-redact", "configMap": {"name": ref.name}})
    return volumes


def _shared_memory(spec: Spec) -> str:
    """The size of /dev/shm: NCCL exchanges through it where GPUs do not reach each other's memory."""
    has_gpus = spec.resources.accelerator is not None and spec.parallelism.ranks > 1
    return _SHARED_MEMORY_GPUS if has_gpus else _SHARED_MEMORY_AUTO


def _chat_template(model: LLMDeployment) -> ConfigMapKeyRef | None:
    """The entry of a ConfigMap that is the chat template, if it comes from one."""
    template = model.spec.engine.chat_template
    return template.config_map_ref if template is not None else None
