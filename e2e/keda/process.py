"""KEDA's two processes on loopback, where its release has two Deployments and a Service.

Its operator reconciles ScaledObjects and queries the triggers; its metrics server serves the results to the
HorizontalPodAutoscaler.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from e2e.cluster import pki
from e2e.cluster.apiserver import ApiServer
from e2e.keda.programs import Programs
from e2e.metrics_adapter.cluster import API_SERVICES
from e2e.operator.world import World
from e2e.ports import free_ports
from e2e.waiting import eventually

NAMESPACE = "keda"
SERVICE = "keda-metrics-apiserver"
API = "v1beta1.external.metrics.k8s.io"


@contextmanager
def running(programs: Programs, server: ApiServer, world: World, directory: Path) -> Iterator[Path]:
    """KEDA, installed and running while the block runs; the log of its operator."""
    world.namespace(NAMESPACE)
    for file in sorted((programs.tree / "config" / "crd" / "bases").glob("*.yaml")):
        world.client.install_crd(yaml.safe_load(file.read_text(encoding="utf-8")))
    keys = pki.Authority(directory / "keys")
    names = ("127.0.0.1", "localhost", f"{SERVICE}.{NAMESPACE}.svc")
    keys.issue(pki.Identity(name="tls", common_name="keda", serves=names))
    questions, answers, *others = free_ports(4)
    log = directory / "keda-operator.log"
    operator = _process([str(programs.operator), *_operator(keys, questions, others)], server, log)
    metrics_server = _process(
        [str(programs.metrics_server), *_metrics_server(server, keys, questions, answers)],
        server,
        directory / f"{SERVICE}.log",
    )
    try:
        _register(world, keys, answers)
        eventually(
            "KEDA's metrics server answers",
            lambda: _is_available(world) or operator.poll() or metrics_server.poll(),
        )
        assert (operator.poll(), metrics_server.poll()) == (None, None), log.read_text(errors="replace")
        yield log
    finally:
        for process in (operator, metrics_server):
            process.kill()
            process.wait()


def _operator(keys: pki.Authority, questions: int, others: list[int]) -> list[str]:
    return [
        f"--cert-dir={keys.directory}",
        f"--metrics-service-bind-address=127.0.0.1:{questions}",
        f"--metrics-bind-address=127.0.0.1:{others[0]}",
        f"--health-probe-bind-address=127.0.0.1:{others[1]}",
    ]


def _metrics_server(server: ApiServer, keys: pki.Authority, questions: int, answers: int) -> list[str]:
    return [
        *(f"--{of}-kubeconfig={server.kubeconfig}" for of in ("lister", "authentication", "authorization")),
        f"--metrics-service-address=127.0.0.1:{questions}",
        "--bind-address=127.0.0.1",
        f"--secure-port={answers}",
        f"--cert-dir={keys.directory}",
        f"--tls-cert-file={keys.directory}/tls.crt",
        f"--tls-private-key-file={keys.directory}/tls.key",
        "--port=0",
    ]


def _process(command: list[str], server: ApiServer, log: Path) -> subprocess.Popen[bytes]:
    environ = {"PATH": os.environ["PATH"], "KUBECONFIG": str(server.kubeconfig), "POD_NAMESPACE": NAMESPACE}
    with log.open("wb") as file:
        # The kernel kills it when this process dies.
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env={**environ, "WATCH_NAMESPACE": "", "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE},
            stdout=file,
            stderr=file,
        )


def _register(world: World, keys: pki.Authority, port: int) -> None:
    """The API of external metrics, as KEDA's release registers it; its Service leads to loopback."""
    external = {"type": "ExternalName", "externalName": "localhost"}
    world.create("Service", NAMESPACE, {"metadata": {"name": SERVICE}, "spec": external})
    version, _, group = API.partition(".")
    spec = {
        "service": {"name": SERVICE, "namespace": NAMESPACE, "port": port},
        "group": group,
        "version": version,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "caBundle": base64.b64encode(keys.certificate.read_bytes()).decode(),
    }
    body = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "spec": spec}
    world.client.request("POST", API_SERVICES, {**body, "metadata": {"name": API}})


def _is_available(world: World) -> bool:
    body = world.client.request("GET", f"{API_SERVICES}/{API}")
    conditions = body.get("status", {}).get("conditions", [])
    return [c["status"] for c in conditions if c["type"] == "Available"] == ["True"]
