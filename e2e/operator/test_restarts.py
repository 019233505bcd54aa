"""A restart of the operator writes nothing but its Lease, and the process ends cleanly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.statusz import StatuszServer, statusz_server
from e2e.operator.world import BUDGET, CHILDREN, NAME_LABEL, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

WATCHED = ("LLMDeployment", *CHILDREN, BUDGET, "HorizontalPodAutoscaler", "ReplicaSet", "Pod")
MODELS = ("serving", "failing", "loading", "wrong", "scaled")


@pytest.mark.deep
def test_ten_restarts_write_nothing_but_the_lease(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    # It sees this namespace alone: its writes concern these objects.
    operator = start("restarts", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    with settled(world, namespace) as speakers:
        operator.stop()
        before = world.writes()
        assert before[f"patch llmdeployments/status {namespace}/serving"] > 0, "the audit log shows writes"

        for _ in range(10):
            asked = [speaker.asked for speaker in speakers]
            operator.start().wait_leading(world)
            eventually("it has looked at all of them", lambda: has_looked(operator, len(MODELS)))
            eventually(
                "it has asked the pods that are not ready",
                lambda asked=asked: all(s.asked > n for s, n in zip(speakers, asked, strict=True)),  # type: ignore[misc]  # mypy infers no lambda that has a default
            )
            operator.stop()

    assert {what: n for what, n in (world.writes() - before).items() if " leases " not in what} == {}


def test_an_operator_stopped_during_its_initial_lists_exits_without_errors(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    for index in range(200):
        labels = {NAME_LABEL: "absent"}
        world.create("ConfigMap", namespace, {"metadata": {"name": f"c-{index}", "labels": labels}})
    operator = start("reader", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    eventually("the first of many", lambda: has_delivered(operator, "ConfigMap"), poll=0.002)

    operator.send(signal.SIGTERM)

    assert operator.wait(15) == 0
    assert world.lease_holder() == ""
    assert "ERROR" not in operator.tail() and "Traceback" not in operator.tail(), operator.tail()


@contextmanager
def settled(world: World, namespace: str) -> Iterator[tuple[StatuszServer, ...]]:
    """One LLMDeployment of each kind, and the last write to each: nothing is left to do."""
    progress = {"phase": "loading", "loadedBytes": 40, "totalBytes": 100, "etaSeconds": 60}
    mismatch = {"phase": "serving", "reason": "CanaryMismatch"}
    with statusz_server(progress) as loading, statusz_server(mismatch) as wrong:
        for name in MODELS:
            fields = {"autoscaling": {"maxReplicas": 9}} if name == "scaled" else {}
            world.deploy(namespace, name, **fields)
            eventually("all children", partial(world.has_children, namespace, name))
        world.scale(namespace, "scaled", 4)
        world.make_pod(namespace, "serving", pods.ready())
        world.make_pod(namespace, "failing", pods.terminated(66, "ModelNotFound", restarts=3))
        world.make_pod(namespace, "loading", pods.loading(ip=loading.ip))
        world.make_pod(namespace, "wrong", pods.loading(ip=wrong.ip))
        for name in MODELS:
            world.roll_out(namespace, name, ready=int(name == "serving"), replicas=1)
            eventually(
                f"the rollout of {name} is in its status",
                lambda name=name: world.status(namespace, name).get("replicas") == 1,  # type: ignore[misc]  # mypy infers no lambda that has a default
            )
            eventually("all children", partial(world.has_children, namespace, name))
        world.wait_condition(namespace, "failing", "Stalled", "True")
        world.wait_condition(namespace, "wrong", "Degraded", "True", "CanaryMismatch")
        eventually("progress", lambda: world.status(namespace, "loading")["model"].get("bytesLoaded") == 40)
        world.wait_condition(namespace, "serving", "Ready", "True")
        eventually("the ready pod is released", lambda: not protecting(world, namespace, "serving"))
        for name in ("serving", "failing", "wrong"):
            eventually(f"the Event of {name}", partial(world.events, namespace, name))
        yield loading, wrong


def has_looked(operator: OperatorProcess, objects: int) -> bool:
    """Every watch has reported something, and so many reconciles have found nothing to do."""
    unchanged = operator.metrics().get('quire_operator_reconcile_total{result="unchanged"}', 0)
    return unchanged >= objects and all(has_delivered(operator, kind) for kind in WATCHED)


def has_delivered(operator: OperatorProcess, kind: str) -> bool:
    return f'quire_operator_watch_last_event_timestamp_seconds{{kind="{kind}"}}' in operator.metrics()


def protecting(world: World, namespace: str, name: str) -> bool:
    (pod,) = world.find("Pod", namespace, f"{NAME_LABEL}={name}")
    return bool(pod["metadata"].get("annotations"))
