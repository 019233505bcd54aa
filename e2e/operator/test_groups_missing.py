"""A cluster without LeaderWorkerSet: one node works, and status says what several need."""

from __future__ import annotations

import pytest

from e2e.operator.process import OperatorProcess
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = pytest.mark.api


def test_several_nodes_without_leader_worker_set_are_told_the_remedy(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", parallelism={"tensor": 2, "nodes": 2})

    found = world.wait_condition(namespace, "m", "Ready", "False", "MissingCRD")
    assert "LeaderWorkerSet" in found["message"] and "spec.parallelism.nodes" in found["message"]
    world.wait_event(namespace, "m", "MissingCRD")


def test_several_ranks_on_one_node_need_no_leader_worker_set(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", parallelism={"tensor": 2}, resources={"cpu": "2", "memory": "2Gi"})

    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    assert world.condition(namespace, "m", "Ready")["reason"] != "MissingCRD"
