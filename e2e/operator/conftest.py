"""One API server for all tests of the operator's process, with the chart's RBAC and its account's token."""

from __future__ import annotations

import base64
import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from e2e.api.client import Client
from e2e.cluster import programs
from e2e.cluster.apiserver import ApiServer
from e2e.operator.process import ROOT, OperatorProcess
from e2e.operator.world import OPERATOR_NAMESPACE, Body, World

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]}],
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    directory = tmp_path_factory.mktemp("audit")
    (directory / "policy.json").write_text(json.dumps(AUDIT), encoding="utf-8")
    extra = (
        f"--audit-policy-file={directory}/policy.json",
        f"--audit-log-path={directory}/audit.log",
        "--audit-log-mode=blocking",
    )
    with ApiServer(extra=extra) as server:
        (server.directory / "audit").symlink_to(directory)
        yield server


@pytest.fixture(scope="session")
def world(server: ApiServer) -> Iterator[World]:
    with Client(server.kubeconfig) as client:
        client.install_crd()
        world = World(client, server.directory / "audit" / "audit.log")
        world.namespace(OPERATOR_NAMESPACE)
        for body in rendered_chart():
            if body["kind"] in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
                client.request("POST", _collection(body), body)
        yield world


@pytest.fixture(scope="session")
def kubeconfig(server: ApiServer, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with a token of the operator's ServiceAccount: the rights of the chart and no others."""
    admin = yaml.safe_load(server.kubeconfig.read_text(encoding="utf-8"))
    answer = world.client.request(
        "POST",
        f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts/quire-operator/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        },
    )
    authority = Path(admin["clusters"][0]["cluster"].pop("certificate-authority")).read_bytes()
    admin["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(authority).decode()
    admin["users"][0]["user"] = {"token": answer["status"]["token"]}
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(yaml.safe_dump(admin), encoding="utf-8")
    return path


@pytest.fixture
def start(world: World, kubeconfig: Path, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts replicas; what is left of them ends with the test."""
    started: list[OperatorProcess] = []

    def start(name: str, **environ: str) -> OperatorProcess:
        started.append(OperatorProcess(name, kubeconfig, tmp_path, **environ).start())
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="module")
def operator(
    world: World, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[OperatorProcess]:
    """One leading replica for all tests of a module."""
    name = f"op-{_dns(request.module.__name__)}"
    process = OperatorProcess(name, kubeconfig, tmp_path_factory.mktemp(name)).start()
    try:
        yield process.wait_leading(world)
    finally:
        process.stop()


@pytest.fixture
def namespace(world: World, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own: without controllers nothing is ever collected."""
    return world.namespace(f"t-{_dns(request.node.name)[:40].strip('-')}-{secrets.token_hex(4)}")


def rendered_chart(*arguments: str) -> list[Body]:
    """The chart's objects as Helm renders them."""
    programs.build(ROOT / ".cluster" / "bin", ("helm",))
    command = [str(ROOT / ".cluster" / "bin" / "helm"), "template", "quire", str(ROOT / "charts" / "quire")]
    command += ["--namespace", OPERATOR_NAMESPACE, "--kube-version", "1.34.0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def _collection(body: Body) -> str:
    plurals = {
        "ServiceAccount": "serviceaccounts",
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
        "Role": "roles",
        "RoleBinding": "rolebindings",
    }
    group = f"/apis/{body['apiVersion']}" if "/" in body["apiVersion"] else f"/api/{body['apiVersion']}"
    namespace = body["metadata"].get("namespace")
    return f"{group}{f'/namespaces/{namespace}' if namespace else ''}/{plurals[body['kind']]}"


def _dns(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.rsplit(".", 1)[-1].lower().removeprefix("test_")).strip("-")
