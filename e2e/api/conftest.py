"""One API server for all tests of the API, with the CRD of this checkout installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.api.client import Client
from e2e.cluster.apiserver import ApiServer


@pytest.fixture(scope="session")
def api() -> Iterator[Client]:
    """etcd and kube-apiserver alone; every test uses dry runs or names of its own."""
    with ApiServer() as server, Client(server.kubeconfig) as client:
        client.install_crd()
        yield client
