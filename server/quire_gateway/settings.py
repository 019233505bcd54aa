"""The gateway's own settings, read once from its environment, which the Helm chart writes."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from quire_gateway.external_secrets import MountedSecret
from quire_gateway.public_addresses import Network
from quire_http.environ import EnvironReader, SettingsError

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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
    batch_url: str = ""  # of quire-batch; empty: there is none
    public_keys: Path | None = None  # the directory with the signing key's public one, and those before it
    health_port: int = 8001  # of the replicas, where a Service has no port of the name `health`
    timeouts: Timeouts = Timeouts()
    drain_seconds: float = 120.0
    pre_stop_seconds: float = 0.0
    max_connection_age: float = math.inf
    limit_store_url: Path | None = None  # a file; none: limits are shares
    limit_store_seconds: float = 0.05  # that an exchange with it may take
    denies_without_store: bool = False  # requests of clients with limits, while the store does not answer
    require_keys: bool = False  # also where there is no LLMClient
    external_secrets: tuple[MountedSecret, ...] = ()
    external_secrets_dir: Path = Path("/etc/quire/external")  # a directory each
    external_networks: tuple[Network, ...] = ()  # that are not public, and external backends may be in
    otlp_endpoint: str = ""  # of a collector for traces; empty: none are made
    trace_sample_ratio: float = 1.0  # of the traces that begin here
    log_level: str = "info"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment. Raises SettingsError."""
        read = EnvironReader(environ)
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
        batch_url, public_keys = read.text("GATEWAY_BATCH_URL", ""), read.text("GATEWAY_PUBLIC_KEYS_DIR", "")
        signing_key = read.text("GATEWAY_SIGNING_KEY_FILE", "")
        if batch_url and not (signing_key and public_keys):
            raise SettingsError(
                "QUIRE_GATEWAY_BATCH_URL needs QUIRE_GATEWAY_SIGNING_KEY_FILE, to say whose a batch is, and "
                "QUIRE_GATEWAY_PUBLIC_KEYS_DIR"
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
            signing_key=Path(signing_key) if signing_key else None,
            batch_url=batch_url,
            public_keys=Path(public_keys) if public_keys else None,
            health_port=int(read.number("GATEWAY_HEALTH_PORT", cls.health_port, 65_535)),
            timeouts=_timeouts(read),
            drain_seconds=read.number("GATEWAY_DRAIN_SECONDS", cls.drain_seconds),
            pre_stop_seconds=read.number("GATEWAY_PRE_STOP_SECONDS", cls.pre_stop_seconds),
            max_connection_age=read.number("GATEWAY_MAX_CONNECTION_AGE_SECONDS", cls.max_connection_age),
            limit_store_url=Path(url) if (url := read.text("GATEWAY_LIMIT_STORE_URL_FILE", "")) else None,
            limit_store_seconds=read.number("GATEWAY_LIMIT_STORE_SECONDS", cls.limit_store_seconds),
            denies_without_store=_denies(read.text("GATEWAY_LIMIT_STORE_ON_LOSS", "Local")),
            require_keys=read.switch("GATEWAY_REQUIRE_KEYS", cls.require_keys),
            external_secrets=_mounted_secrets(read.text("GATEWAY_EXTERNAL_SECRETS", "[]")),
            external_secrets_dir=Path(
                read.text("GATEWAY_EXTERNAL_SECRETS_DIR", str(cls.external_secrets_dir))
            ),
            external_networks=_networks(read.text("GATEWAY_EXTERNAL_NETWORKS", "")),
            otlp_endpoint=_collector(read.text("GATEWAY_OTLP_ENDPOINT", "")),
            trace_sample_ratio=read.number("GATEWAY_TRACE_SAMPLE_RATIO", 1.0, most=1.0),
            log_level=level,
        )


def _timeouts(read: EnvironReader) -> Timeouts:
    return Timeouts(
        first_byte=read.number("GATEWAY_FIRST_BYTE_SECONDS", Timeouts.first_byte),
        whole=read.number("GATEWAY_WHOLE_ANSWER_SECONDS", Timeouts.whole),
        idle=read.number("GATEWAY_IDLE_SECONDS", Timeouts.idle),
    )


def _mounted_secrets(text: str) -> tuple[MountedSecret, ...]:
    """Those of the chart's gateway.externalSecrets, in JSON. Raises SettingsError."""
    try:
        return tuple(
            MountedSecret(
                str(one["name"]), tuple(map(str, one["hosts"])), tuple(map(str, one.get("namespaces") or ()))
            )
            for one in orjson.loads(text)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(f"QUIRE_GATEWAY_EXTERNAL_SECRETS cannot be read: {error!r}") from None


def _networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(ip_network(one.strip()) for one in text.split(",") if one.strip())
    except ValueError as error:
        raise SettingsError(f"QUIRE_GATEWAY_EXTERNAL_NETWORKS: {error}") from None


def _collector(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_sound = False
    if url and not is_sound:
        raise SettingsError(
            f"QUIRE_GATEWAY_OTLP_ENDPOINT={url!r}: use an address such as http://collector:4318"
        )
    return url


def _denies(on_loss: str) -> bool:
    if on_loss not in ("Local", "Deny"):
        raise SettingsError(f"QUIRE_GATEWAY_LIMIT_STORE_ON_LOSS={on_loss!r}: use Local or Deny")
    return on_loss == "Deny"


def _in_cluster(environ: Mapping[str, str]) -> str:
    """The API server as the kubelet names it to every pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
