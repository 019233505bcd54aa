"""Ownership of the number of replicas moves between the spec, our autoscaler and KEDA, whose CRD may be
installed later.

KEDA itself runs in `make keda`. Here the tests create the autoscaler for a ScaledObject and scale as KEDA
does. The real API server validates with KEDA's schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster import crds
from e2e.operator.test_autoscaling import autoscaler, count, counts, edit, owners
from e2e.operator.world import MERGE, PATHS, Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator"), pytest.mark.timeout(120)]

SCALED = {"minReplicas": 2, "maxReplicas": 50, "backend": "KEDA"}
FINALIZER = "finalizer.keda.sh"


@pytest.fixture
def installed(world: World) -> Iterator[None]:
    """With KEDA's CRD installed while the block runs."""
    world.client.install_crd(crds.crd(crds.SCALED_OBJECT))
    yield
    for body in world.client.request("GET", "/apis/keda.sh/v1alpha1/scaledobjects")["items"]:
        path = f"{PATHS['ScaledObject'].format(body['metadata']['namespace'])}/{body['metadata']['name']}"
        world.client.request("PATCH", path, {"metadata": {"finalizers": None}}, MERGE)
    world.uninstall("ScaledObject")


def taken_up(world: World, namespace: str) -> Body:
    """What KEDA does with a ScaledObject: adds a finalizer, and creates an autoscaler with its labels."""
    made = eventually("the ScaledObject", lambda: world.get("ScaledObject", namespace, "m"))
    world.patch("ScaledObject", namespace, "m", {"metadata": {"finalizers": [FINALIZER]}})
    owner = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": "m", "controller": True}
    body = autoscaler("keda-hpa-m", metrics=[])
    body["metadata"]["labels"] = {**made["metadata"]["labels"], "scaledobject.keda.sh/name": "m"}
    body["metadata"]["ownerReferences"] = [{**owner, "uid": made["metadata"]["uid"]}]
    return world.create("HorizontalPodAutoscaler", namespace, body)


def let_go(world: World, namespace: str) -> None:
    """What KEDA does when the ScaledObject is deleted: deletes its autoscaler and removes its finalizer."""
    world.delete("HorizontalPodAutoscaler", namespace, "keda-hpa-m")
    world.patch("ScaledObject", namespace, "m", {"metadata": {"finalizers": None}})


def is_terminating(world: World, namespace: str) -> bool:
    return "deletionTimestamp" in world.read("ScaledObject", namespace, "m")["metadata"]


def conflicts(world: World, namespace: str) -> list[str]:
    return [e["reason"] for e in world.events(namespace, "m") if e["reason"] == "ConflictingAutoscaler"]


def test_keda_installed_later_is_used_without_a_restart(
    world: World, namespace: str, request: pytest.FixtureRequest
) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    missing = world.wait_condition(namespace, "m", "ScalingActive", "False", "KEDAMissing")
    assert "Install KEDA" in missing["message"]
    eventually("all other children", lambda: world.has_children(namespace, "m"))
    world.wait_events(namespace, "m", "KEDAMissing")

    request.getfixturevalue("installed")
    made = eventually("the ScaledObject", lambda: world.get("ScaledObject", namespace, "m"))
    assert made["spec"]["scaleTargetRef"]["name"] == "m"
    world.wait_condition(namespace, "m", "ScalingActive", "Unknown", "AwaitingKEDA")
    assert count(world, namespace) == 2


@pytest.mark.usefixtures("installed")
def test_switching_to_keda_and_back_never_lowers_the_replicas(world: World, namespace: str) -> None:
    since = world.deploy(namespace, "m", replicas=6)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    edit(world, namespace, 1, replicas=None, autoscaling=SCALED)
    taken_up(world, namespace)
    eventually("it is mirrored", lambda: world.status(namespace, "m")["scaling"].get("autoscaler"))
    assert world.status(namespace, "m")["scaling"]["autoscaler"] == "keda-hpa-m"
    edit(world, namespace, 2)
    assert (count(world, namespace), owners(world, namespace)) == (6, {"quire-operator"})

    world.scale(namespace, "m", 8)
    edit(world, namespace, 3)
    assert (count(world, namespace), owners(world, namespace)) == (8, {"kube-controller-manager"})

    edit(world, namespace, 4, replicas=9, autoscaling=None)
    eventually("KEDA is asked to stop", lambda: is_terminating(world, namespace))
    edit(world, namespace, 5)
    assert count(world, namespace) == 8, "while KEDA's autoscaler is there, no one overrides it"
    let_go(world, namespace)
    eventually("the spec's number", lambda: count(world, namespace) == 9)

    assert counts(world, namespace, since) == sorted(counts(world, namespace, since))
    assert conflicts(world, namespace) == []
    assert world.writes()[f"delete scaledobjects {namespace}/m"] == 1


@pytest.mark.usefixtures("installed")
def test_our_autoscaler_is_created_only_after_keda_has_released_its_own(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", autoscaling=SCALED)
    taken_up(world, namespace)
    world.scale(namespace, "m", 5)

    edit(world, namespace, 1, autoscaling={"backend": "HPA"})
    eventually("KEDA is asked to stop", lambda: is_terminating(world, namespace))
    edit(world, namespace, 2)
    assert world.get("HorizontalPodAutoscaler", namespace, "m") is None, "Kubernetes would stop both"
    let_go(world, namespace)
    eventually("our autoscaler", lambda: world.get("HorizontalPodAutoscaler", namespace, "m"))

    edit(world, namespace, 3, autoscaling={"backend": "KEDA"})
    eventually("the ScaledObject", lambda: world.get("ScaledObject", namespace, "m"))
    assert world.get("HorizontalPodAutoscaler", namespace, "m") is None
    assert (count(world, namespace), conflicts(world, namespace)) == (5, [])


@pytest.mark.usefixtures("installed")
def test_a_deployment_that_keda_scaled_to_zero_stays_at_zero_until_keda_scales_it_up(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", autoscaling={**SCALED, "idle": {"afterSeconds": 60}})
    taken_up(world, namespace)
    idle = world.read("ScaledObject", namespace, "m")["spec"]
    assert (idle["idleReplicaCount"], idle["cooldownPeriod"], idle["minReplicaCount"]) == (0, 60, 2)
    world.wait_condition(namespace, "m", "ActivatorReady", "False", "ActivatorMissing")
    world.wait_event(namespace, "m", "ActivatorMissing")

    world.scale(namespace, "m", 0)
    assert owners(world, namespace) == set(), "a 0 that comes through /scale has no owner"
    edit(world, namespace, 1)
    world.wait_condition(namespace, "m", "ScalingActive", "True", "Idle")
    world.wait_condition(namespace, "m", "Ready", "False", "Idle")
    assert world.status(namespace, "m")["phase"] == "Idle"
    assert count(world, namespace) == 0
    edit(world, namespace, 2)
    assert count(world, namespace) == 0

    world.scale(namespace, "m", 2)
    edit(world, namespace, 3)
    eventually("it is awake", lambda: world.status(namespace, "m")["phase"] == "Pending")
    assert count(world, namespace) == 2


@pytest.mark.usefixtures("installed")
def test_an_edited_or_deleted_scaled_object_is_restored(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", autoscaling={**SCALED, "fallback": {"replicas": 3}})
    made = taken_up(world, namespace)
    world.patch("ScaledObject", namespace, "m", {"spec": {"maxReplicaCount": 999}})
    touch = {"metadata": {"annotations": {"touched": "by KEDA"}}}
    world.patch("HorizontalPodAutoscaler", namespace, made["metadata"]["name"], touch)
    eventually("mended", lambda: spec(world, namespace)["maxReplicaCount"] == 50)

    world.delete("ScaledObject", namespace, "m")
    let_go(world, namespace)
    eventually("made again", lambda: spec(world, namespace).get("fallback", {}).get("replicas") == 3)
    edit(world, namespace, 1)
    before = world.writes()[f"patch scaledobjects {namespace}/m"]
    edit(world, namespace, 2)
    assert world.writes()[f"patch scaledobjects {namespace}/m"] == before, "what is right is not written"


@pytest.mark.usefixtures("installed")
def test_a_foreign_scaled_object_is_reported_and_left_alone(world: World, namespace: str) -> None:
    target: Body = {"name": "m"}
    trigger: dict[str, Any] = {"type": "cron", "metadata": {"timezone": "UTC"}}
    theirs = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "m"},
        "spec": {"scaleTargetRef": target, "triggers": [trigger]},
    }
    before = world.create("ScaledObject", namespace, theirs)
    world.deploy(namespace, "m", autoscaling=SCALED)

    world.wait_condition(namespace, "m", "Ready", "False", "OwnershipConflict")
    assert world.read("ScaledObject", namespace, "m")["spec"] == before["spec"]


def spec(world: World, namespace: str) -> Body:
    found: Body = (world.get("ScaledObject", namespace, "m") or {}).get("spec", {})
    return found
