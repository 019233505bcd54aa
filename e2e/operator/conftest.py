"""One API server for all tests of the operator's process, with the chart's RBAC and its account's token."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.audited import audited
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World


@pytest.fixture(scope="session")
def audited_world() -> Iterator[tuple[ApiServer, World]]:
    with audited() as both:
        yield both


@pytest.fixture(scope="session")
def server(audited_world: tuple[ApiServer, World]) -> ApiServer:
    return audited_world[0]


@pytest.fixture(scope="session")
def world(audited_world: tuple[ApiServer, World]) -> World:
    return audited_world[1]


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
