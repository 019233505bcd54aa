"""KEDA itself scales by the adapter's values, gives up the Deployment when its ScaledObject is deleted, and
scales to zero.

The tests simulate the Deployment controller: they report as many pods as the spec wants. All else is real.
"""

from __future__ import annotations

import pytest

from e2e.api.client import RefusedError
from e2e.metrics_adapter.cluster import Cluster
from e2e.metrics_adapter.engines import Answer, Engine, says
from e2e.operator.test_autoscaling import counts, owners
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.keda, pytest.mark.usefixtures("operator"), pytest.mark.timeout(1800)]

AT_ONCE = {"pods": 8, "periodSeconds": 15, "stabilizationWindowSeconds": 0}
SCALED = {
    "minReplicas": 1,
    "maxReplicas": 8,
    "backend": "KEDA",
    "behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE},
}


def replicas(world: World, namespace: str) -> int:
    """The wanted number of replicas; all of them are reported as running."""
    deployment = world.read("Deployment", namespace, "m")
    wanted = int(deployment["spec"]["replicas"])
    if deployment.get("status", {}).get("replicas", 0) != wanted:
        world.roll_out(namespace, "m", ready=wanted)
    return wanted


def wait_replicas(world: World, namespace: str, number: int) -> None:
    eventually(f"{number} replicas", lambda: replicas(world, namespace) == number)


def wait_mirrored(world: World, namespace: str) -> None:
    """Until the status mirrors KEDA's autoscaler."""

    def mirrored() -> bool:
        replicas(world, namespace)
        return bool(world.status(namespace, "m").get("scaling", {}).get("autoscaler") == "keda-hpa-m")

    eventually("KEDA's autoscaler in the status", mirrored)
    world.wait_condition(namespace, "m", "ScalingActive", "True", "ValidMetricFound")


def active(world: World, namespace: str, *, status: str) -> Body | None:
    """The condition ScalingActive, once it has this status."""
    condition = world.condition(namespace, "m", "ScalingActive")
    return condition if condition["status"] == status else None


def conditions_of_keda(world: World, namespace: str) -> dict[str, str]:
    status: Body = world.read("ScaledObject", namespace, "m").get("status", {})
    return {c["type"]: c["status"] for c in status.get("conditions", [])}


def engine_of(cluster: Cluster, world: World, namespace: str, answer: Answer) -> Engine:
    """A ready pod of the operator's own Deployment: only pods that an LLMDeployment owns count."""
    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    return cluster.engine(namespace, "m", answer)


def test_keda_follows_the_queue_keeps_the_pods_when_it_is_not_known_and_gives_the_number_back(
    cluster: Cluster, world: World, namespace: str
) -> None:
    since = world.deploy(
        namespace, "m", autoscaling={**SCALED, "fallback": {"replicas": 2, "failureThreshold": 2}}
    )
    engine = engine_of(cluster, world, namespace, says(queue=5))
    eventually("all children", lambda: world.has_children(namespace, "m"))
    wait_mirrored(world, namespace)
    eventually(
        "KEDA takes the ScaledObject for sound",
        lambda: conditions_of_keda(world, namespace).get("Ready") == "True",
    )

    engine.answer = says(queue=35)
    wait_replicas(world, namespace, 4)
    engine.answer = lambda: (503, b"")
    eventually(
        "KEDA falls back",
        lambda: conditions_of_keda(world, namespace).get("Fallback") == "True",
    )
    assert replicas(world, namespace) == 4, "those that are there stay"

    world.patch("LLMDeployment", namespace, "m", {"spec": {"replicas": 6, "autoscaling": None}})
    wait_replicas(world, namespace, 6)
    assert world.get("ScaledObject", namespace, "m") is None
    assert world.get("HorizontalPodAutoscaler", namespace, "keda-hpa-m") is None
    assert owners(world, namespace) == {"quire-operator"}
    seen = counts(world, namespace, since)
    assert seen == sorted(seen), "no dip"


def test_keda_takes_all_pods_of_an_idle_one_away_and_brings_the_least_back(
    cluster: Cluster, world: World, namespace: str
) -> None:
    scaled = {**SCALED, "minReplicas": 2, "backend": "Auto", "idle": {"afterSeconds": 5}}
    world.deploy(namespace, "m", autoscaling=scaled)
    engine = engine_of(cluster, world, namespace, says(queue=25))
    eventually("all children", lambda: world.has_children(namespace, "m"))
    wait_replicas(world, namespace, 3)  # KEDA asks again after 30 s, if it asked before the pod was there
    wait_mirrored(world, namespace)

    engine.answer = says(queue=0)
    wait_replicas(world, namespace, 0)
    eventually("the status says so", lambda: world.status(namespace, "m").get("phase") == "Idle")
    world.wait_condition(namespace, "m", "ScalingActive", "True", "Idle")
    assert cluster.value(namespace, "m") == "0"

    engine.answer = says(queue=25)
    eventually("it is awake", lambda: replicas(world, namespace) >= 2)
    wait_replicas(world, namespace, 3)
    wait_mirrored(world, namespace)


def test_an_unknown_load_is_an_error_to_keda_and_moves_nothing(
    cluster: Cluster, world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    engine = engine_of(cluster, world, namespace, says(queue=35))
    eventually("all children", lambda: world.has_children(namespace, "m"))
    wait_replicas(world, namespace, 4)

    engine.answer = lambda: (503, b"")
    failed = eventually("the status says why", lambda: active(world, namespace, status="False"))
    assert failed["reason"] == "MetricsUnavailable", failed
    with pytest.raises(RefusedError):
        cluster.items(namespace, "m", "llm_queue_depth")
    assert replicas(world, namespace) == 4
