"""One API server for all tests of the operator's process, with the chart's RBAC and its account's token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.api import profiles
from e2e.api.client import Client
from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.process import OperatorProcess
from e2e.operator.world import OPERATOR_NAMESPACE, World

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
        client.install_crd(profiles.CRD)
        world = World(client, server.directory / "audit" / "audit.log")
        world.namespace(OPERATOR_NAMESPACE)
        rights.install(world, rights.rendered_chart())
        yield world


@pytest.fixture(scope="session")
def kubeconfig(server: ApiServer, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rights of the operator's ServiceAccount: those of the chart and no others."""
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    return rights.token_kubeconfig(server, world, "quire-operator", path)


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


def _dns(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.rsplit(".", 1)[-1].lower().removeprefix("test_")).strip("-")
