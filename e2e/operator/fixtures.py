"""Fixtures for tests that start operators against an API server with an audit log: e2e/operator and
e2e/chaos.

Their conftests import them and define `audited_world` with the controllers that they need.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import rights
from e2e.operator.world import World


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
def namespace(world: World, request: pytest.FixtureRequest) -> str:
    """A namespace for one test. Without controllers, nothing is garbage-collected."""
    return world.namespace(f"t-{dns(request.node.name)[:40].strip('-')}-{secrets.token_hex(4)}")


def dns(text: str) -> str:
    """The name of a test or module as part of an object name."""
    return re.sub(r"[^a-z0-9]+", "-", text.rsplit(".", 1)[-1].lower().removeprefix("test_")).strip("-")
