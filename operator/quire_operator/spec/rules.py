"""Rules that a schema cannot say: across fields, or with advice of their own. The CRD has them in CEL.

`spec.parse` calls them after reading. One table of cases (e2e/api) drives both this module and the CRD on a
real API server, so that they cannot drift apart.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.spec import memory_rules, placement_rules, routes, scaling_rules, source_rules
from quire_operator.spec.references import LABEL_KEY, EnvVar
from quire_operator.spec.tree import LabelSelector, Peer, Spec, Speculation

NAME_MAX_LENGTH = 40
NAME_PATTERN = r"[a-z]([-a-z0-9]*[a-z0-9])?"

# A flag with a field of the CR, or one that the operator computes: given twice, the two would disagree.
RESERVED_FLAGS = (
    "api-keys-dir",
    "block-size",
    "canary-interval-seconds",
    "cpu-offload-gb",
    "device",
    "drain-timeout-seconds",
    "dtype",
    "enable-chunked-prefill",
    "enable-prefix-caching",
    "enforce-eager",
    "generation-config",
    "gpu-memory-utilization",
    "health-port",
    "help",
    "host",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
    "kv-offload-disk-bytes",
    "kv-offload-disk-path",
    "kv-offload-host-bytes",
    "load-stall-timeout-seconds",
    "log-redact-path",
    "log-requests",
    "max-log-len",
    "max-model-len",
    "max-num-queued-reqs",
    "max-num-queued-tokens",
    "max-num-reqs-per-key",
    "max-num-seqs",
    "max-requests-per-minute-per-key",
    "max-tokens-per-minute-per-key",
    "num-speculative-tokens",
    "otlp-endpoint",
    "port",
    "preemption-mode",
    "pre-stop-seconds",
    "quantization",
    "request-timeout-seconds",
    "scheduling-policy",
    "served-model-name",
    "speculative-method",
    "speculative-model",
    "stall-timeout-seconds",
    "startup-timeout-seconds",
    "termination-log",
    "trace-sample-ratio",
    "watermark",
    "watermark-key-path",
)
RESERVED_FLAG_PATTERN = rf"(--(no-)?({'|'.join(RESERVED_FLAGS)})(=(.|\n)*)?|-h+)"
RESERVED_ENV_PATTERN = r"(QUIRE_|LD_|PYTHON).*"


def check_name(name: object) -> None:
    """Children carry the CR's name: a Service wants DNS-1035, and hashes follow it in some."""
    if not isinstance(name, str) or len(name) > NAME_MAX_LENGTH or not re.fullmatch(NAME_PATTERN, name):
        raise SpecError(
            "metadata.name",
            f"use at most {NAME_MAX_LENGTH} lower-case letters, digits and dashes, starting with a letter",
        )


def check(spec: Spec) -> None:
    """Every rule, in the order of the fields."""
    source_rules.check(spec.model.source, spec.cache)
    if spec.model.source.pvc is not None:
        _check_path("spec.model.source.pvc.path", spec.model.source.pvc.path)
    source_rules.check_replicas(spec)
    if spec.cache is not None:
        _check_env("spec.cache.download.env", spec.cache.download.env)
    _check_speculation(spec.engine.speculation)
    _check_extra_args(spec.engine.extra_args)
    _check_env("spec.engine.env", spec.engine.env, names.ENV_FAULT)
    placement_rules.check_resources(spec.resources)
    memory_rules.check(spec)
    if spec.engine.enforce_eager and spec.resources.accelerator is None:
        raise SpecError("spec.engine.enforceEager", "only a GPU has graphs to do without: set resources.gpu")
    _check_limits_per_key(spec)
    _check_watermark(spec)
    scaling_rules.check(spec)
    placement_rules.check_scheduling(spec.scheduling)
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


def _check_path(field: str, path: str) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise SpecError(field, "give a path relative to the root of the volume, without '..'")


def _check_speculation(speculation: Speculation) -> None:
    field, path = "spec.engine.speculation.draftModelPath", speculation.draft_model_path
    if (speculation.method == "DraftModel") != bool(path):
        raise SpecError(field, "method DraftModel and draftModelPath need each other: set both, or neither")
    _check_path(field, path)


def _check_extra_args(arguments: Iterable[str]) -> None:
    for index, argument in enumerate(arguments):
        if re.fullmatch(RESERVED_FLAG_PATTERN, argument):
            flag = argument.partition("=")[0]
            raise SpecError(
                f"spec.engine.extraArgs[{index}]",
                f"{flag} is set by the operator: drop it, use the field of the LLMDeployment instead",
            )


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


def _check_times(spec: Spec) -> None:
    if spec.health.load_stall_timeout_seconds > spec.health.startup_timeout_seconds:
        raise SpecError(
            "spec.health",
            "loadStallTimeoutSeconds is never reached: keep it within startupTimeoutSeconds",
        )
    if spec.drain.pre_stop_seconds + spec.drain.timeout_seconds > 3600:
        raise SpecError("spec.drain", "preStopSeconds and timeoutSeconds together may take 3600 at most")


def _check_networking(spec: Spec) -> None:
    path = "spec.networking.service.annotations"
    for key in spec.networking.service.annotations:
        if key.startswith(f"{names.GROUP}/") or not re.fullmatch(LABEL_KEY, key):
            raise SpecError(path, f"{key!r:.80} cannot be used: write domain/name, not under {names.GROUP}/")
    for index, peer in enumerate(spec.networking.network_policy.allow_from):
        _check_peer(peer, f"spec.networking.networkPolicy.allowFrom[{index}]")
    routes.check(spec.networking.http_route)


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
    placement_rules.check_keys(selector.match_labels, f"{path}.matchLabels")
    for index, requirement in enumerate(selector.match_expressions):
        if (requirement.operator in ("In", "NotIn")) != bool(requirement.values):
            raise SpecError(
                f"{path}.matchExpressions[{index}]",
                "operators In and NotIn need values, Exists and DoesNotExist take none",
            )
