"""An API server for the tests of what it makes of the chart's objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.api.client import Client
from e2e.cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """With the namespaces of the objects and nothing of the chart; what a test creates stays."""
    with ApiServer() as server, Client(server.kubeconfig) as client:
        for name in ("quire-system", "team-a", "team-b"):
            client.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        yield client
