"""Another release of the operator restarts no pod; a rollout without resources continues; a failed one rolls
back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.test_restarts import has_delivered
from e2e.operator.world import BUDGET, CHILDREN, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

Body = dict[str, Any]
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
DONE = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}


def image(world: World, namespace: str, name: str = "m") -> str:
    deployment = world.read("Deployment", namespace, name)
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def settings(world: World, namespace: str) -> str:
    """Name of the ConfigMap that the pods are made with: another one for each change of the engine."""
    (container,) = world.read("Deployment", namespace, "m")["spec"]["template"]["spec"]["containers"]
    return str(container["envFrom"][0]["configMapRef"]["name"])


def revisions(world: World, namespace: str) -> list[str]:
    """From the oldest to the newest."""
    found = world.find("ControllerRevision", namespace)
    return [str(r["metadata"]["name"]) for r in sorted(found, key=lambda r: int(r["revision"]))]


def edit(world: World, namespace: str, **fields: Any) -> None:
    world.patch("LLMDeployment", namespace, "m", {"spec": fields})


def test_a_newer_operator_with_other_defaults_changes_no_child_until_the_spec_is_edited(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    first = start("release-1", QUIRE_WATCH_NAMESPACES=namespace, QUIRE_ENGINE_IMAGE="registry.example/e:1")
    first.wait_leading(world)
    world.deploy(namespace, "m", replicas=1)
    world.deploy(namespace, "eager", rollout={"adoptOperatorDefaults": "Always"})
    world.deploy(namespace, "broken")
    eventually("all children", lambda: world.has_children(namespace, "broken"))
    world.make_pod(namespace, "broken", pods.waiting("ErrImagePull", "no such tag"))
    world.roll_out(namespace, "broken", ready=0, replicas=1)
    for name in ("m", "eager"):
        eventually("all children", partial(world.has_children, namespace, name))
        world.make_pod(namespace, name, pods.ready())
        world.roll_out(namespace, name, ready=1, progressing=DONE)
        world.wait_condition(namespace, name, "Ready", "True")
    eventually("its budget", lambda: world.has_children(namespace, "m"))
    before = {kind: world.child(kind, namespace, "m") or {} for kind in (*CHILDREN, BUDGET)}
    assert revisions(world, namespace)
    first.stop()

    assert all(before.values())
    second = start(
        "release-2",
        QUIRE_WATCH_NAMESPACES=namespace,
        QUIRE_ENGINE_IMAGE="registry.example/e:2",
        QUIRE_MONITORING_NAMESPACE_LABELS="team=metrics",
    ).wait_leading(world)
    eventually("the one that wants it has it", lambda: image(world, namespace, "eager").endswith("e:2"))
    eventually("what never served is mended", lambda: image(world, namespace, "broken").endswith("e:2"))
    eventually(
        "newer defaults are reported", lambda: "availableRenderRevision" in world.status(namespace, "m")
    )
    status = world.status(namespace, "m")
    eventually("its watches have delivered events", lambda: has_delivered(second, "Deployment"))
    assert {kind: world.child(kind, namespace, "m") for kind in before} == before, "not even a write"
    assert status["renderRevision"] != status["availableRenderRevision"]
    assert world.condition(namespace, "m", "Ready")["status"] == "True"

    edit(world, namespace, replicas=2)
    eventually("two", lambda: world.read("Deployment", namespace, "m")["spec"]["replicas"] == 2)
    assert image(world, namespace).endswith("e:1"), "scaling is no reason to restart pods"

    newer = world.status(namespace, "m")["availableRenderRevision"]
    edit(world, namespace, rollout={"restartId": "now"})
    eventually("the new defaults", lambda: image(world, namespace).endswith("e:2"))
    eventually("nothing is newer", lambda: "availableRenderRevision" not in world.status(namespace, "m"))
    assert world.status(namespace, "m")["renderRevision"] != newer, "the restart id is part of the template"
    assert "metrics" in str(world.child("NetworkPolicy", namespace, "m"))


@pytest.mark.usefixtures("operator")
def test_reverting_to_an_earlier_spec_reuses_its_revision(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", engine={"maxModelLen": 1024})
    (one,) = eventually("a revision", lambda: revisions(world, namespace))
    edit(world, namespace, engine={"maxModelLen": 2048})
    eventually("another", lambda: len(revisions(world, namespace)) == 2)
    _, two = revisions(world, namespace)
    edit(world, namespace, engine={"maxModelLen": 1024})
    eventually("the first is the newest", lambda: revisions(world, namespace) == [two, one])
    eventually("it serves", lambda: world.status(namespace, "m").get("renderRevision") == one)


@pytest.mark.usefixtures("operator")
def test_ten_revisions_are_kept(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    for number in range(13):
        edit(world, namespace, rollout={"restartId": str(number)})
        eventually(
            "it is applied",
            lambda number=number: (  # type: ignore[misc]  # mypy infers no lambda that has a default
                (live := world.get("Deployment", namespace, "m"))
                and f"'{number}'" in str(live["spec"]["template"]["metadata"]["annotations"])
            ),
        )
    eventually("ten", lambda: len(revisions(world, namespace)) == 10)
    newest = world.find("ControllerRevision", namespace)
    assert max(int(r["revision"]) for r in newest) >= 13
    assert all(r["metadata"]["ownerReferences"][0]["kind"] == "LLMDeployment" for r in newest)


@pytest.mark.usefixtures("operator")
def test_a_rollout_falls_back_to_in_place_without_resources_and_the_next_one_surges_again(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", replicas=2, rollout={"surgeWaitSeconds": 30})
    eventually("all children", lambda: world.has_children(namespace, "m"))
    old = [world.make_pod(namespace, "m", pods.ready()) for _ in range(2)]
    world.roll_out(namespace, "m", ready=2, progressing=DONE)
    world.wait_condition(namespace, "m", "Ready", "True")
    assert surge(world, namespace) == 1

    edit(world, namespace, rollout={"restartId": "2"})
    eventually(
        "the change",
        lambda: "restart-id" in str(world.read("Deployment", namespace, "m")["spec"]["template"]),
    )
    waiting = pods.condition("PodScheduled", "False", reason="Unschedulable", message=NO_GPU, ago=5)
    reported = {"phase": "Pending", "conditions": [waiting]}
    new = world.make_pod(namespace, "m", reported, revision=2)
    moving = {
        **pods.condition("Progressing", "True", reason="ReplicaSetUpdated"),
        "lastUpdateTime": pods.at(),
    }
    world.roll_out(namespace, "m", ready=2, replicas=3, updated=1, progressing=moving)
    world.wait_condition(namespace, "m", "RolloutComplete", "False", "WaitingToSurge")
    assert surge(world, namespace) == 1

    late = {"status": {"conditions": [{**waiting, "lastTransitionTime": pods.at(-31)}]}}
    world.patch("Pod", namespace, new["metadata"]["name"], late, status=True)
    condition = world.wait_condition(namespace, "m", "RolloutComplete", "False", "SurgeUnschedulable")
    assert "nvidia.com/gpu" in condition["message"]
    assert surge(world, namespace) == 0
    assert world.status(namespace, "m")["rollout"] == {"strategyInEffect": "InPlace"}

    for pod in old:
        world.delete("Pod", namespace, pod["metadata"]["name"])
    world.patch("Pod", namespace, new["metadata"]["name"], {"status": pods.ready()}, status=True)
    world.roll_out(namespace, "m", ready=2, replicas=2, progressing=DONE)
    world.wait_condition(namespace, "m", "RolloutComplete", "True")
    eventually("the next one surges", lambda: surge(world, namespace) == 1)
    eventually("reported", lambda: events_with_reason(world, namespace, "SurgeUnschedulable"))
    assert len(events_with_reason(world, namespace, "SurgeUnschedulable")) == 1
    assert {e["reason"] for e in world.events(namespace, "m")} <= {"Ready", "SurgeUnschedulable"}


@pytest.mark.usefixtures("operator")
def test_a_failed_rollout_rolls_back_to_the_ready_revision_and_the_next_edit_is_rolled_out(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", rollout={"autoRollback": True})
    eventually("all children", lambda: world.has_children(namespace, "m"))
    good = settings(world, namespace)
    world.make_pod(namespace, "m", pods.ready())
    world.roll_out(namespace, "m", ready=1, progressing=DONE)
    world.wait_condition(namespace, "m", "Ready", "True")

    edit(world, namespace, engine={"maxModelLen": 77})
    bad = eventually("the edit", lambda: (now := settings(world, namespace)) != good and now)
    asked = world.read("LLMDeployment", namespace, "m")["spec"]
    world.make_pod(namespace, "m", pods.waiting("ErrImagePull", "no such tag"), revision=2)
    world.roll_out(namespace, "m", ready=1, replicas=2, updated=1, progressing=LATE)
    eventually("the good settings", lambda: settings(world, namespace) == good)

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "RolledBack")
    assert "ProgressDeadlineExceeded" in stalled["message"] and "no such tag" in stalled["message"]
    assert world.read("LLMDeployment", namespace, "m")["spec"] == asked, "the user's spec is the user's"
    world.roll_out(namespace, "m", ready=1, progressing=DONE)
    world.wait_condition(namespace, "m", "Available", "True")
    assert settings(world, namespace) == good
    assert world.condition(namespace, "m", "Ready")["reason"] == "RolledBack"
    assert len(events_with_reason(world, namespace, "RolledBack")) == 1

    edit(world, namespace, engine={"maxModelLen": 78})
    eventually("the next edit", lambda: settings(world, namespace) not in (good, bad))
    world.wait_condition(namespace, "m", "Stalled", "False")


def surge(world: World, namespace: str) -> int:
    return int(world.read("Deployment", namespace, "m")["spec"]["strategy"]["rollingUpdate"]["maxSurge"])


def events_with_reason(world: World, namespace: str, reason: str) -> list[Body]:
    return [event for event in world.events(namespace, "m") if event["reason"] == reason]
