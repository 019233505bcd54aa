"""Restarting the operator changes nothing: it writes its Lease and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World, eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]


def test_ten_restarts_write_nothing_but_the_lease(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    operator = start("restarts").wait_leading(world)
    for name in ("serving", "failing"):
        world.deploy(namespace, name)
        eventually("all children", lambda name=name: world.has_children(namespace, name))  # type: ignore[misc]
    world.make_pod(namespace, "serving", pods.ready())
    world.make_pod(namespace, "failing", pods.terminated(66, "ModelNotFound", restarts=3))
    world.roll_out(namespace, "serving", ready=1)
    world.roll_out(namespace, "failing", ready=0, replicas=1)
    world.wait_condition(namespace, "serving", "Ready", "True")
    world.wait_condition(namespace, "failing", "Stalled", "True")
    eventually("the ready pod is released", lambda: not protecting(world, namespace, "serving"))
    operator.stop()
    before = world.writes()
    assert before[f"patch llmdeployments/status {namespace}/serving"] > 0, "the audit log shows the writes"

    for _ in range(10):
        operator.start().wait_leading(world)
        eventually("it has looked at both", lambda: reconciled(operator) >= 2)
        operator.stop()

    # Of its own namespace only; story 4 counts the writes to a whole cluster.
    assert {what: n for what, n in (world.writes() - before).items() if f" {namespace}/" in what} == {}


def protecting(world: World, namespace: str, name: str) -> bool:
    (pod,) = world.find("Pod", namespace, f"serving.quire.dev/name={name}")
    return bool(pod["metadata"].get("annotations"))


def reconciled(operator: OperatorProcess) -> float:
    lines = operator.ask("/metrics")[1].splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("quire_operator_reconcile_total{"))
