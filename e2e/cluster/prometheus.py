"""Debian's prometheus and promtool, and the CRDs of the Prometheus operator.

The package is unpacked beside the other programs and not installed: installed, it would start a service.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from e2e.cluster import modules
from e2e.cluster.errors import HostError

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
    unpacked = state / "prometheus"
    programs = unpacked / "usr" / "bin"
    state.mkdir(parents=True, exist_ok=True)
    with (state / ".prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (programs / "promtool").exists():
            with tempfile.TemporaryDirectory(dir=state) as directory:
                new = Path(directory) / "new"
                _run(["dpkg-deb", "--extract", str(_download(Path(directory))), str(new)])
                shutil.rmtree(unpacked, ignore_errors=True)
                new.rename(unpacked)
    return programs


def _download(directory: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise HostError(f"no apt-get: put prometheus and promtool into {directory.parent}/prometheus/usr/bin")
    print("fetching Debian's prometheus", flush=True)
    command = ["apt-get", "download", "-q", "prometheus"]
    try:
        _run(command, directory)
    except HostError:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update", "-q"])  # a fresh machine has no lists
        _run(command, directory)
    (package,) = directory.glob("prometheus_*.deb")
    return package


def _run(command: list[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise HostError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
