"""The adapter's own settings, read once from its environment, which the Helm chart writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_metrics_adapter.errors import SettingsError
from quire_operator import names

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The identity of this replica, its ports and its TLS."""

    pod_name: str
    namespace: str
    service: str  # name of the Service in the APIServices
    port: int = 6443
    probe_port: int = 8080
    engine_port: int = names.PORT_HTTP
    certificate_seconds: int = 86_400  # of self-issued certificates, which are renewed after half of it
    tls_directory: Path | None = None  # directory of a mounted tls.crt and tls.key
    log_level: str = "info"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the environment; a value that is missing or cannot be used is a SettingsError."""
        level = environ.get("QUIRE_LOG_LEVEL") or cls.log_level
        if level not in LOG_LEVELS:
            raise SettingsError(f"QUIRE_LOG_LEVEL={level!r}: use one of {', '.join(LOG_LEVELS)}")
        directory = environ.get("QUIRE_ADAPTER_TLS_DIRECTORY", "")
        return cls(
            pod_name=_required(environ, "POD_NAME"),
            namespace=_required(environ, "POD_NAMESPACE"),
            service=_required(environ, "QUIRE_ADAPTER_SERVICE"),
            port=_number(environ, "QUIRE_ADAPTER_PORT", cls.port, 65_535),
            probe_port=_number(environ, "QUIRE_ADAPTER_PROBE_PORT", cls.probe_port, 65_535),
            engine_port=_number(environ, "QUIRE_ADAPTER_ENGINE_PORT", cls.engine_port, 65_535),
            certificate_seconds=_number(
                environ, "QUIRE_ADAPTER_CERTIFICATE_SECONDS", cls.certificate_seconds, 31_536_000
            ),
            tls_directory=Path(directory) if directory else None,
            log_level=level,
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which the Service is called; the aggregator uses the longest."""
        return (self.service, f"{self.service}.{self.namespace}", f"{self.service}.{self.namespace}.svc")


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise SettingsError(f"{name} is not set: the chart sets it")
    return value


def _number(environ: Mapping[str, str], name: str, default: int, highest: int) -> int:
    value = environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= highest):
        raise SettingsError(f"{name}={value!r}: use a number between 1 and {highest}")
    return int(value)
