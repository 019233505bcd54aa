"""The gateway's own settings, read once from its environment, which the Helm chart writes."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class SettingsError(Exception):
    """A variable is missing, or its value cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that a replica may take."""

    first_byte: float = 30.0  # of a stream
    whole: float = 600.0  # of an answer that comes in one piece, which is all of its computation
    idle: float = 60.0  # between two parts of an answer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What it serves, where it listens, and where the API server is."""

    namespaces: tuple[str, ...]  # of two LLMDeployments with one name that in the first is served
    kube_api: str
    service_account: Path = SERVICE_ACCOUNT  # the directory with its token and the API server's CA
    host: str = "0.0.0.0"
    port: int = 8080
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)  # of digests of prompts
    peer_service: str = ""  # the headless Service of all gateways; empty: there are no others to tell
    peer_port: int = 8082
    pod_namespace: str = ""  # where its Lease is; empty: it has none, and writes no status
    pod_name: str = ""
    signing_key: Path | None = None  # none: requests are not signed
    health_port: int = 8001  # of the replicas, where a Service has no port of the name `health`
    timeouts: Timeouts = Timeouts()
    drain_seconds: float = 120.0
    pre_stop_seconds: float = 0.0
    max_connection_age: float = math.inf
    require_keys: bool = False  # also where there is no LLMClient
    log_level: str = "info"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment. Raises SettingsError."""
        read = _Reader(environ)
        level = read.text("LOG_LEVEL", cls.log_level)
        if level not in LOG_LEVELS:
            raise SettingsError(f"QUIRE_LOG_LEVEL={level!r}: use one of {', '.join(LOG_LEVELS)}")
        namespaces = read.text("GATEWAY_NAMESPACES", environ.get("POD_NAMESPACE", "")).split(",")
        kube_api = read.text("GATEWAY_KUBE_API", _in_cluster(environ))
        if not kube_api or not any(namespaces):
            raise SettingsError(
                "the gateway runs in a pod: KUBERNETES_SERVICE_HOST and POD_NAMESPACE are not set, nor "
                "QUIRE_GATEWAY_KUBE_API and QUIRE_GATEWAY_NAMESPACES in their place"
            )
        peer_service, seed = read.text("GATEWAY_PEER_SERVICE", ""), read.text("GATEWAY_SEED", "")
        if peer_service and not seed:
            raise SettingsError(
                "QUIRE_GATEWAY_PEER_SERVICE needs QUIRE_GATEWAY_SEED, a secret of all gateways"
            )
        return cls(
            namespaces=tuple(dict.fromkeys(filter(None, map(str.strip, namespaces)))),
            kube_api=kube_api,
            service_account=Path(read.text("GATEWAY_SERVICE_ACCOUNT", str(SERVICE_ACCOUNT))),
            host=read.text("GATEWAY_HOST", cls.host),
            port=int(read.number("GATEWAY_PORT", cls.port, 65_535)),
            seed=hashlib.sha256(seed.encode()).digest() if seed else secrets.token_bytes(32),
            peer_service=peer_service,
            peer_port=int(read.number("GATEWAY_PEER_PORT", cls.peer_port, 65_535)),
            pod_namespace=environ.get("POD_NAMESPACE", ""),
            pod_name=read.text("GATEWAY_POD_NAME", environ.get("HOSTNAME", "")),
            signing_key=Path(key) if (key := read.text("GATEWAY_SIGNING_KEY_FILE", "")) else None,
            health_port=int(read.number("GATEWAY_HEALTH_PORT", cls.health_port, 65_535)),
            timeouts=Timeouts(
                first_byte=read.number("GATEWAY_FIRST_BYTE_SECONDS", Timeouts.first_byte),
                whole=read.number("GATEWAY_WHOLE_ANSWER_SECONDS", Timeouts.whole),
                idle=read.number("GATEWAY_IDLE_SECONDS", Timeouts.idle),
            ),
            drain_seconds=read.number("GATEWAY_DRAIN_SECONDS", cls.drain_seconds),
            pre_stop_seconds=read.number("GATEWAY_PRE_STOP_SECONDS", cls.pre_stop_seconds),
            max_connection_age=read.number("GATEWAY_MAX_CONNECTION_AGE_SECONDS", cls.max_connection_age),
            require_keys=read.switch("GATEWAY_REQUIRE_KEYS", cls.require_keys),
            log_level=level,
        )


class _Reader:
    """Variables by their names without the prefix."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str, default: str) -> str:
        """A text; an empty one is none."""
        return self._environ.get(f"QUIRE_{name}", "").strip() or default

    def switch(self, name: str, default: bool) -> bool:
        """True or false. Raises SettingsError."""
        text = self.text(name, "true" if default else "false").lower()
        if text not in ("true", "false"):
            raise SettingsError(f"QUIRE_{name}={text!r}: use true or false")
        return text == "true"

    def number(self, name: str, default: float, most: float = math.inf) -> float:
        """A number that is not negative. Raises SettingsError."""
        text = self.text(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise SettingsError(f"QUIRE_{name}={text!r}: use a number from 0 to {most:g}")
        return value


def _in_cluster(environ: Mapping[str, str]) -> str:
    """The API server as the kubelet names it to every pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
