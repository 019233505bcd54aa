"""KEDA, the metrics adapter and the operator beside one API server and Kubernetes' own autoscaler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.api import profiles
from e2e.keda import process, programs
from e2e.metrics_adapter.cluster import Cluster
from e2e.metrics_adapter.fixtures import adapter, cluster, kubeconfig, namespace
from e2e.metrics_adapter.replica import AdapterReplica
from e2e.operator import rights
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World

__all__ = ["adapter", "cluster", "kubeconfig", "namespace"]


@pytest.fixture(scope="session")
def world(cluster: Cluster) -> World:
    return cluster.world


@pytest.fixture(scope="session")
def keda(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Running KEDA; the log of its operator."""
    built = programs.build(cluster.server.bin_dir)
    cluster.server.run_controllers("garbage-collector-controller")
    with process.running(built, cluster.server, cluster.world, tmp_path_factory.mktemp("keda")) as log:
        yield log


@pytest.fixture(scope="session")
def operator(
    cluster: Cluster, adapter: AdapterReplica, keda: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """A leading replica whose ScaledObjects use this adapter."""
    cluster.world.client.install_crd(profiles.CRD)
    directory = tmp_path_factory.mktemp("operator")
    credentials = rights.token_kubeconfig(
        cluster.server, cluster.world, "quire-operator", directory / "kubeconfig"
    )
    load_url = f"http://127.0.0.1:{adapter.port}/load"
    replica = OperatorProcess("op-keda", credentials, directory, QUIRE_LOAD_URL=load_url).start()
    try:
        yield replica.wait_leading(cluster.world)
    finally:
        replica.stop()
