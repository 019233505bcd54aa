"""The fixtures of this folder, and additional replicas of the adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.metrics_adapter.cluster import Cluster
from e2e.metrics_adapter.fixtures import adapter, cluster, kubeconfig, namespace
from e2e.metrics_adapter.replica import AdapterReplica

__all__ = ["adapter", "cluster", "kubeconfig", "namespace"]


@pytest.fixture
def start(cluster: Cluster, kubeconfig: Path, tmp_path: Path) -> Iterator[Callable[..., AdapterReplica]]:
    """Starts more replicas, which are stopped at the end of the test."""
    started: list[AdapterReplica] = []

    def start(name: str, **environ: str) -> AdapterReplica:
        started.append(AdapterReplica(name, kubeconfig, tmp_path, cluster.engine_port, **environ).start())
        return started[-1]

    yield start
    for replica in started:
        replica.stop()
