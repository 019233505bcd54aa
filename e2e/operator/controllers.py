"""Some of Kubernetes' own controllers beside the API server, to test their interplay with the operator."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.apiserver import ApiServer


@contextmanager
def running(server: ApiServer, *names: str, flags: tuple[str, ...] = ()) -> Iterator[Path]:
    """kube-controller-manager with these controllers only, syncing every second; its log."""
    log = server.directory / f"{names[0]}.log"
    command = [
        str(server.bin_dir / "kube-controller-manager"),
        f"--kubeconfig={server.kubeconfig}",
        f"--controllers={','.join(names)}",
        "--horizontal-pod-autoscaler-sync-period=1s",
        "--leader-elect=false",
        "--secure-port=0",
        *flags,
    ]
    with _running(command, log):
        yield log


@contextmanager
def scheduling(server: ApiServer) -> Iterator[Path]:
    """kube-scheduler; its log."""
    log = server.directory / "kube-scheduler.log"
    command = [
        str(server.bin_dir / "kube-scheduler"),
        f"--kubeconfig={server.kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
    with _running(command, log):
        yield log


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        # The kernel kills it when this process dies.
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=file, stderr=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()
