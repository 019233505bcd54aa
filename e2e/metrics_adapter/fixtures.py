"""One API server with aggregator and two controllers, and one replica of the adapter, for all tests.

For the conftests of e2e/metrics_adapter and e2e/keda, which import them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.metrics_adapter.cluster import Cluster, aggregated
from e2e.metrics_adapter.replica import SERVICE, AdapterReplica
from e2e.operator import rights
from e2e.ports import free_port


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """With the controllers of namespaces and of autoscalers."""
    with aggregated(free_port()) as cluster:
        cluster.server.run_controllers("namespace-controller", "horizontal-pod-autoscaler-controller")
        yield cluster


@pytest.fixture(scope="session")
def kubeconfig(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rights of the adapter's ServiceAccount: those of the chart and no others."""
    path = tmp_path_factory.mktemp("adapter") / "kubeconfig"
    return rights.token_kubeconfig(cluster.server, cluster.world, SERVICE, path)


@pytest.fixture(scope="session")
def adapter(
    cluster: Cluster, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterReplica]:
    """The replica that serves all tests."""
    directory = tmp_path_factory.mktemp("adapter-a")
    replica = AdapterReplica("adapter-a", kubeconfig, directory, cluster.engine_port).start()
    try:
        cluster.service.backends = [replica.wait_ready().https_port]
        cluster.wait_available()
        yield replica
    finally:
        replica.stop()


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    return cluster.world.namespace(f"t-{secrets.token_hex(4)}")
