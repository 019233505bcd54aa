"""With Kubernetes' own HorizontalPodAutoscaler: its writes are recognized and its conditions mirrored.

It has no metrics here, and so only applies its bounds.
"""

from __future__ import annotations

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers, pods
from e2e.operator.statusz import statusz_server
from e2e.operator.test_autoscaling import autoscaler, count, counts, edit, owners
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator"), pytest.mark.timeout(120)]


def test_ownership_of_replicas_moves_to_the_hpa_controller_and_back(
    world: World, namespace: str, server: ApiServer
) -> None:
    since = world.deploy(namespace, "m", replicas=6)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    with controllers.running(server, "horizontal-pod-autoscaler-controller"):
        edit(world, namespace, 1, replicas=None, autoscaling={"maxReplicas": 8})
        eventually("it has looked", lambda: condition_reasons(world, namespace))
        edit(world, namespace, 2)
        assert (count(world, namespace), owners(world, namespace)) == (6, {"quire-operator"})

        edit(world, namespace, 3, autoscaling={"maxReplicas": 4})
        eventually("its upper bound", lambda: count(world, namespace) == 4)
        assert owners(world, namespace) == {"kube-controller-manager"}
        edit(world, namespace, 4, autoscaling={"minReplicas": 5, "maxReplicas": 9})
        eventually("its lower bound", lambda: count(world, namespace) == 5)
        assert owners(world, namespace) == {"kube-controller-manager"}

        edit(world, namespace, 5, autoscaling=None, replicas=7)
        eventually("the spec's number", lambda: count(world, namespace) == 7)

    numbers = counts(world, namespace, since)
    assert [n for n, before in zip(numbers, [0, *numbers], strict=False) if n != before] == [6, 4, 5, 7]


def test_missing_metrics_and_a_conflicting_autoscaler_are_reported(
    world: World, namespace: str, server: ApiServer
) -> None:
    world.deploy(namespace, "m", autoscaling={"maxReplicas": 8})
    world.make_pod(namespace, "m", pods.ready())
    with controllers.running(server, "horizontal-pod-autoscaler-controller"):
        eventually("it has looked", lambda: condition_reasons(world, namespace))
        world.wait_condition(namespace, "m", "ScalingActive", "Unknown", "NoReadyReplica")
        world.roll_out(namespace, "m", ready=1)
        world.wait_condition(namespace, "m", "ScalingActive", "Unknown", "AwaitingMetrics")
        world.wait_condition(namespace, "m", "Ready", "True")

        serving_for_long(world, namespace)
        missing = world.wait_condition(namespace, "m", "ScalingActive", "False", "MetricsUnavailable")
        assert "llm_queue_depth" in missing["message"] and "adapter" in missing["message"]
        world.wait_events(namespace, "m", "Ready", "MetricsUnavailable")
        world.wait_condition(namespace, "m", "Ready", "True")
        assert count(world, namespace) == 1

        world.create("HorizontalPodAutoscaler", namespace, autoscaler("theirs", metrics=[]))
        world.wait_condition(namespace, "m", "ScalingActive", "False", "ConflictingAutoscaler")
        eventually(
            "Kubernetes stops both",
            lambda: "AmbiguousSelector" in condition_reasons(world, namespace),
        )
        world.delete("HorizontalPodAutoscaler", namespace, "theirs")
        world.wait_condition(namespace, "m", "ScalingActive", "False", "MetricsUnavailable")

    world.wait_events(
        namespace, "m", "Ready", "MetricsUnavailable", "ConflictingAutoscaler", "MetricsUnavailable"
    )


def test_pods_have_deletion_costs_by_load_only_while_a_scale_down_is_imminent(
    world: World, namespace: str
) -> None:
    """No controller here: the autoscaler's status is written as it writes it."""
    world.deploy(namespace, "m", autoscaling={"maxReplicas": 8})
    idle, busy = (
        {"phase": "serving", "running": 0, "queued": 0},
        {"phase": "serving", "running": 9, "queued": 1},
    )
    with statusz_server(idle) as first, statusz_server(busy) as second:
        pairs = {"idle": first, "busy": second}
        made = {
            name: world.make_pod(
                namespace,
                "m",
                pods.status(
                    pods.running(ready=True), conditions=(pods.condition("Ready", "True"),), ip=speaker.ip
                ),
            )
            for name, speaker in pairs.items()
        }
        world.roll_out(namespace, "m", ready=2)
        world.wait_condition(namespace, "m", "Ready", "True")
        assert costs(world, namespace, made) == {"idle": None, "busy": None}

        say(world, namespace, "ScaleDownStabilized")
        eventually("marks", lambda: costs(world, namespace, made) == {"idle": "0", "busy": "4"})
        say(world, namespace, "ReadyForNewScale")
        eventually("no marks", lambda: costs(world, namespace, made) == {"idle": None, "busy": None})


def costs(world: World, namespace: str, made: dict[str, Body]) -> dict[str, str | None]:
    """The deletion cost of each pod."""
    live = {name: world.read("Pod", namespace, body["metadata"]["name"]) for name, body in made.items()}
    key = "controller.kubernetes.io/pod-deletion-cost"
    return {name: body["metadata"].get("annotations", {}).get(key) for name, body in live.items()}


def say(world: World, namespace: str, reason: str) -> None:
    able = {"type": "AbleToScale", "status": "True", "reason": reason, "lastTransitionTime": pods.at()}
    status = {"currentReplicas": 2, "desiredReplicas": 2, "conditions": [able]}
    world.patch("HorizontalPodAutoscaler", namespace, "m", {"status": status}, status=True)


def condition_reasons(world: World, namespace: str) -> set[str]:
    """The reasons in our autoscaler's own conditions."""
    hpa = world.get("HorizontalPodAutoscaler", namespace, "m") or {}
    return {c["reason"] for c in hpa.get("status", {}).get("conditions", ()) if c["type"] == "ScalingActive"}


def serving_for_long(world: World, namespace: str) -> None:
    """The first pod became ready minutes ago; the operator keeps the times that it finds."""
    found = world.status(namespace, "m")["conditions"]
    earlier = [{**c, "lastTransitionTime": pods.at(-300)} if c["type"] == "Available" else c for c in found]
    world.patch("LLMDeployment", namespace, "m", {"status": {"conditions": earlier}}, status=True)
