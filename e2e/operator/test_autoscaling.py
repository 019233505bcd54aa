"""Ownership of the number of replicas moves between the spec and an autoscaler without the number ever
falling.

No controllers run here: the tests scale as the HorizontalPodAutoscaler controller does, and the real API
server maintains managedFields.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from e2e.api.client import RefusedError
from e2e.operator import pods
from e2e.operator.world import PATHS, Body, World
from e2e.waiting import eventually
from quire_operator.plan import ReplicaOwner, replica_owner

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

SCALED = {"minReplicas": 2, "maxReplicas": 50}


def edit(world: World, namespace: str, length: int, **spec: Any) -> None:
    """Edit the LLMDeployment, and wait until the pod template follows."""
    patch = {"rollout": {"restartId": str(length)}, **spec}
    world.patch("LLMDeployment", namespace, "m", {"spec": patch})

    def follows() -> bool:
        deployment = world.read("Deployment", namespace, "m")
        annotations = deployment["spec"]["template"]["metadata"].get("annotations", {})
        return bool(annotations.get("serving.quire.dev/restart-id") == str(length))

    eventually("the edit in the Deployment", follows)


def count(world: World, namespace: str) -> int:
    return int(world.read("Deployment", namespace, "m")["spec"]["replicas"])


def counts(world: World, namespace: str, since: Body) -> list[int]:
    """Every number that the Deployment has had."""
    return [int(body["spec"]["replicas"]) for body in world.history("Deployment", namespace, since)]


def owners(world: World, namespace: str) -> set[str]:
    """The managers that own spec.replicas."""
    managed = world.read("Deployment", namespace, "m")["metadata"]["managedFields"]
    return {m["manager"] for m in managed if "f:replicas" in m["fieldsV1"].get("f:spec", {})}


def autoscaler(name: str, **spec: Any) -> Body:
    """An autoscaler of another owner."""
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "m"}
    return {"metadata": {"name": name}, "spec": {"scaleTargetRef": target, "maxReplicas": 9, **spec}}


def test_a_new_deployment_starts_at_min_replicas_and_is_then_left_to_the_autoscaler(
    world: World, namespace: str
) -> None:
    since = world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    hpa = world.read("HorizontalPodAutoscaler", namespace, "m")
    assert hpa["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "m"}
    assert (count(world, namespace), owners(world, namespace)) == (2, {"quire-operator"})

    edit(world, namespace, 1)
    world.scale(namespace, "m", 7)
    assert owners(world, namespace) == {"kube-controller-manager"}
    edit(world, namespace, 2)
    world.scale(namespace, "m", 9)
    edit(world, namespace, 3)

    assert counts(world, namespace, since) == sorted(counts(world, namespace, since))
    assert count(world, namespace) == 9
    assert owners(world, namespace) == {"kube-controller-manager"}
    writes = world.writes()
    assert writes[f"patch deployments {namespace}/m"] == 4, "one to create it, and one for each edit"
    assert writes[f"patch horizontalpodautoscalers {namespace}/m"] == 1


def test_switching_to_an_autoscaler_and_back_never_lowers_the_replicas(world: World, namespace: str) -> None:
    since = world.deploy(namespace, "m", replicas=6)
    eventually("all children", lambda: world.has_children(namespace, "m"))

    edit(world, namespace, 1, replicas=None, autoscaling=SCALED)
    eventually("the autoscaler", lambda: world.get("HorizontalPodAutoscaler", namespace, "m"))
    edit(world, namespace, 2)
    assert (count(world, namespace), owners(world, namespace)) == (6, {"quire-operator"})

    world.scale(namespace, "m", 8)
    edit(world, namespace, 3)
    assert (count(world, namespace), owners(world, namespace)) == (8, {"kube-controller-manager"})

    edit(world, namespace, 4, replicas=8, autoscaling=None)
    eventually("no autoscaler", lambda: not world.get("HorizontalPodAutoscaler", namespace, "m"))
    eventually("the spec's number", lambda: "quire-operator" in owners(world, namespace))
    world.scale(namespace, "m", 9)
    eventually("repaired", lambda: count(world, namespace) == 8)

    assert set(counts(world, namespace, since)) == {6, 8, 9}
    assert counts(world, namespace, since)[0] == 6


def test_an_apply_with_stale_replicas_is_rejected_after_the_autoscaler_changed_them(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    read = world.read("Deployment", namespace, "m")
    world.scale(namespace, "m", 7)

    selector, template = read["spec"]["selector"], read["spec"]["template"]
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "m"},
        "spec": {"replicas": 2, "selector": selector, "template": template},
    }
    path = f"{PATHS['Deployment'].format(namespace)}/m?fieldManager=quire-operator&force=true"
    with pytest.raises(RefusedError, match="has been modified"):
        late = replica_owner.with_replicas(manifest, ReplicaOwner.HPA, read)
        world.client.request("PATCH", path, late, "application/apply-patch+yaml")
    assert count(world, namespace) == 7


def test_replicas_set_by_a_busy_autoscaler_are_never_reverted(world: World, namespace: str) -> None:
    since = world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))

    def grow() -> None:
        for replicas in range(3, 41):
            world.scale(namespace, "m", replicas)

    thread = threading.Thread(target=grow)
    thread.start()
    for number in range(20):
        world.patch("LLMDeployment", namespace, "m", {"spec": {"rollout": {"restartId": str(number)}}})
    thread.join()
    edit(world, namespace, 99)

    seen = counts(world, namespace, since)
    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_switching_to_the_users_autoscaler_keeps_the_replicas(world: World, namespace: str) -> None:
    since = world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    world.scale(namespace, "m", 5)

    edit(world, namespace, 1, autoscaling={"maxReplicas": 9, "minReplicas": None, "backend": "External"})
    eventually("no autoscaler", lambda: not world.get("HorizontalPodAutoscaler", namespace, "m"))
    eventually("the status", lambda: world.status(namespace, "m").get("scaling") == {"backend": "External"})
    world.create("HorizontalPodAutoscaler", namespace, autoscaler("theirs"))
    eventually("it is seen", lambda: world.status(namespace, "m")["scaling"].get("autoscaler") == "theirs")
    edit(world, namespace, 2)

    assert counts(world, namespace, since) == sorted(counts(world, namespace, since))
    assert count(world, namespace) == 5


def test_suspending_deletes_the_autoscaler_and_resuming_restores_min_replicas(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    world.scale(namespace, "m", 5)

    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": True}})
    eventually("no pods", lambda: count(world, namespace) == 0)
    eventually("no autoscaler", lambda: not world.get("HorizontalPodAutoscaler", namespace, "m"))
    world.wait_condition(namespace, "m", "ScalingActive", "False", "Suspended")

    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": False}})
    eventually("the least", lambda: count(world, namespace) == 2)
    eventually("the autoscaler", lambda: world.get("HorizontalPodAutoscaler", namespace, "m"))


def test_a_foreign_autoscaler_is_reported_and_its_replicas_are_left_alone(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", replicas=3)
    eventually("all children", lambda: world.has_children(namespace, "m"))

    world.create("HorizontalPodAutoscaler", namespace, autoscaler("theirs"))
    conflict = world.wait_condition(namespace, "m", "ScalingActive", "False", "ConflictingAutoscaler")
    assert "HorizontalPodAutoscaler theirs" in conflict["message"]
    world.wait_events(namespace, "m", "ConflictingAutoscaler")
    world.scale(namespace, "m", 5)
    edit(world, namespace, 1)
    assert count(world, namespace) == 5

    world.delete("HorizontalPodAutoscaler", namespace, "theirs")
    eventually("the spec's number again", lambda: count(world, namespace) == 3)
    eventually("no condition", lambda: not has_condition(world, namespace, "ScalingActive"))


def test_scaling_up_is_mirrored_and_ready_stays_true(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", autoscaling={**SCALED, "minReplicas": 1})
    world.make_pod(namespace, "m", pods.ready())
    world.roll_out(namespace, "m", ready=1)
    world.wait_condition(namespace, "m", "Ready", "True")
    since = world.read("LLMDeployment", namespace, "m")

    world.scale(namespace, "m", 4)
    reported = {"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound", "message": "x"}
    reported["lastTransitionTime"] = pods.at()
    hpa = {"currentReplicas": 1, "desiredReplicas": 4, "lastScaleTime": pods.at(), "conditions": [reported]}
    world.patch("HorizontalPodAutoscaler", namespace, "m", {"status": hpa}, status=True)
    world.wait_condition(namespace, "m", "ScalingActive", "True", "ValidMetricFound")
    eventually("4 of them", lambda: world.status(namespace, "m")["scaling"]["desiredReplicas"] == 4)
    world.roll_out(namespace, "m", ready=1, replicas=4)
    eventually("4 pods", lambda: world.status(namespace, "m")["replicas"] == 4)
    world.roll_out(namespace, "m", ready=4)
    world.wait_condition(namespace, "m", "Ready", "True", "AllReplicasReady")

    for body in world.history("LLMDeployment", namespace, since):
        conditions = {c["type"]: c["status"] for c in body["status"]["conditions"]}
        assert (conditions["Ready"], conditions["Reconciling"]) == ("True", "False")


def test_an_edited_or_deleted_autoscaler_is_restored(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    world.patch("HorizontalPodAutoscaler", namespace, "m", {"spec": {"maxReplicas": 99}})
    eventually("mended", lambda: max_replicas(world, namespace) == 50)

    world.delete("HorizontalPodAutoscaler", namespace, "m")
    eventually("back", lambda: max_replicas(world, namespace) == 50)


def max_replicas(world: World, namespace: str) -> int:
    return int(
        (world.get("HorizontalPodAutoscaler", namespace, "m") or {"spec": {"maxReplicas": 0}})["spec"][
            "maxReplicas"
        ]
    )


def has_condition(world: World, namespace: str, kind: str) -> bool:
    return any(c["type"] == kind for c in world.status(namespace, "m").get("conditions", ()))
