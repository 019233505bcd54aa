"""The operator's own settings, read once from its environment, which the Helm chart writes.

Everything else gets the frozen Settings passed in. Knows no LLMDeployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.errors import SettingsError

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
LOG_LEVELS = ("debug", "info", "warning", "error")
ANY, LABELLED = "Any", "Labelled"
BOOLEANS = {"true": True, "false": False}
LOAD_URL = "http://quire-metrics-adapter.quire-system.svc:8080/load"
MONITORING_NAMESPACE = (("kubernetes.io/metadata.name", "monitoring"),)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the administrator decided for all LLMDeployments of this operator."""

    engine_image: str
    engine_image_pull_policy: str = "IfNotPresent"
    engine_image_pull_secrets: tuple[str, ...] = ()  # names of Secrets in the namespace of the pods
    operator_namespace: str = "quire-system"
    pod_name: str = "quire-operator"
    watch_namespaces: tuple[str, ...] = ()  # none named = all
    allow_faults: bool = False
    allowed_env: tuple[str, ...] = ()  # names beside those that every LLMDeployment may set
    credential_hosts: tuple[
        str, ...
    ] = ()  # beside the hub and the clouds' own stores; "*" at the front: any name that ends so
    secret_references: str = ANY  # Labelled: only to Secrets with the label that allows it
    monitoring_namespace_labels: tuple[tuple[str, str], ...] = MONITORING_NAMESPACE
    gateway_namespaces: tuple[str, ...] = ()  # whose models are asked by a gateway
    gateway_keys_config_map: str = ""  # there, with the gateway's public keys; empty where it signs none
    load_url: str = LOAD_URL  # of the metrics adapter, for KEDA; empty where there is none
    log_level: str = "info"
    metrics_port: int = 8080
    lease_duration_seconds: int = 15
    lease_renew_deadline_seconds: int = 10
    lease_retry_seconds: int = 2
    resync_seconds: int = 600

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment; a missing image or a value that cannot be used is a SettingsError."""
        image = environ.get("QUIRE_ENGINE_IMAGE", "").strip()
        if not image:
            raise SettingsError("QUIRE_ENGINE_IMAGE is not set: give the image of quire-server")
        return cls(
            engine_image=image,
            engine_image_pull_policy=_one_of(
                environ, "QUIRE_ENGINE_IMAGE_PULL_POLICY", PULL_POLICIES, cls.engine_image_pull_policy
            ),
            engine_image_pull_secrets=_words(environ.get("QUIRE_ENGINE_IMAGE_PULL_SECRETS", "")),
            operator_namespace=environ.get("POD_NAMESPACE") or cls.operator_namespace,
            pod_name=environ.get("POD_NAME") or cls.pod_name,
            watch_namespaces=_words(environ.get("QUIRE_WATCH_NAMESPACES", "")),
            allow_faults=BOOLEANS[_one_of(environ, "QUIRE_ALLOW_FAULTS", tuple(BOOLEANS), "false")],
            allowed_env=_words(environ.get("QUIRE_ALLOWED_ENV", "")),
            credential_hosts=_words(environ.get("QUIRE_CREDENTIAL_HOSTS", "")),
            secret_references=_one_of(environ, "QUIRE_SECRET_REFERENCES", (ANY, LABELLED), ANY),
            monitoring_namespace_labels=_labels(environ) or cls.monitoring_namespace_labels,
            gateway_namespaces=_words(environ.get("QUIRE_GATEWAY_NAMESPACES", "")),
            gateway_keys_config_map=environ.get("QUIRE_GATEWAY_KEYS_CONFIG_MAP", ""),
            load_url=environ.get("QUIRE_LOAD_URL", cls.load_url).rstrip("/"),
            log_level=_one_of(environ, "QUIRE_LOG_LEVEL", LOG_LEVELS, cls.log_level),
            metrics_port=_port(environ, "QUIRE_METRICS_PORT", cls.metrics_port),
            lease_duration_seconds=_seconds(
                environ, "QUIRE_LEASE_DURATION_SECONDS", cls.lease_duration_seconds
            ),
            lease_renew_deadline_seconds=_seconds(
                environ, "QUIRE_LEASE_RENEW_DEADLINE_SECONDS", cls.lease_renew_deadline_seconds
            ),
            lease_retry_seconds=_seconds(environ, "QUIRE_LEASE_RETRY_SECONDS", cls.lease_retry_seconds),
            resync_seconds=_seconds(environ, "QUIRE_RESYNC_SECONDS", cls.resync_seconds),
        )

    def has_gateway(self, namespace: str) -> bool:
        """Whether a gateway passes on requests to the models of a namespace, and holds those for one that has
        no pod.
        """
        return namespace in self.gateway_namespaces

    def gateway_keys(self, namespace: str) -> str:
        """The ConfigMap of the public keys that pods of a namespace trust; empty where there is none."""
        return self.gateway_keys_config_map if namespace in self.gateway_namespaces else ""

    def __post_init__(self) -> None:
        if not self.lease_duration_seconds > self.lease_renew_deadline_seconds > self.lease_retry_seconds:
            raise SettingsError("the Lease needs duration > renew deadline > retry, in seconds")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _one_of(environ: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = environ.get(name) or default
    if value not in allowed:
        raise SettingsError(f"{name}={value!r}: use one of {', '.join(allowed)}")
    return value


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
        raise SettingsError(f"{name}={value!r}: use a port between 1 and 65535")
    return int(value)


def _seconds(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 86_400):
        raise SettingsError(f"{name}={value!r}: use a number of seconds between 1 and 86400")
    return int(value)


def _labels(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """`key=value,key=value`: the labels of the namespace from which Prometheus scrapes."""
    pairs = []
    for word in _words(environ.get("QUIRE_MONITORING_NAMESPACE_LABELS", "")):
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise SettingsError(f"QUIRE_MONITORING_NAMESPACE_LABELS={word!r}: write key=value")
        pairs.append((key, value))
    return tuple(pairs)
