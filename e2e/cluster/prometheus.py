"""Debian's prometheus and promtool, and the CRDs of the Prometheus operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.cluster import debian, modules

MODULE = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
SHA256 = {
    "podmonitors": "8ce88c52c51209993511cae093089c9525f5552def88119e3f559123ee9d454b",
    "prometheusrules": "98fd16c9ab79fba8dcd6ef62c957c98cd6546ab74ce0a4ecf09ddf2fda03020e",
}


def crds() -> list[dict[str, Any]]:
    """Those of PodMonitor and PrometheusRule."""
    folder = "example/prometheus-operator-crd/monitoring.coreos.com"
    return [modules.crd(MODULE, f"{folder}_{plural}.yaml", sha256) for plural, sha256 in SHA256.items()]


def unpack(state: Path) -> Path:
    """The directory of the two programs, which are fetched into `state` when they are not there."""
    return debian.unpack(state, "prometheus", ["prometheus"], "usr/bin/promtool") / "usr" / "bin"
