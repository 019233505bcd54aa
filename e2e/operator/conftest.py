"""One API server for all tests of the operator's process, with the chart's RBAC and its account's token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator.audited import audited
from e2e.operator.fixtures import dns, kubeconfig, namespace, server, world
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World

__all__ = ["kubeconfig", "namespace", "server", "world"]


@pytest.fixture(scope="session")
def audited_world() -> Iterator[tuple[ApiServer, World]]:
    with audited() as both:
        yield both


@pytest.fixture
def start(world: World, kubeconfig: Path, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts replicas, which are stopped at the end of the test."""
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
    name = f"op-{dns(request.module.__name__)}"
    process = OperatorProcess(name, kubeconfig, tmp_path_factory.mktemp(name)).start()
    try:
        yield process.wait_leading(world)
    finally:
        process.stop()
