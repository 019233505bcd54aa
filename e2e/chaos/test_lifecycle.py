"""Changes around an LLMDeployment: its namespace is deleted, its CRD changes, the node of a pod is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from e2e.api.client import RefusedError
from e2e.api.specs import CRD
from e2e.chaos.children import Body, children, pods
from e2e.chaos.conftest import CREATED, is_settled, settled
from e2e.operator import pods as kubelet
from e2e.operator.process import OperatorProcess
from e2e.operator.world import NAME_LABEL, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

Start = Callable[..., OperatorProcess]
Steps = dict[str, dict[str, Body]]
CRD_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD['metadata']['name']}"


@pytest.mark.deep
@pytest.mark.chaos(
    10, fault="a namespace with LLMDeployments deleted, once with no operator", proof="Terminating"
)
@pytest.mark.parametrize("is_up", [True, False], ids=["operator-up", "operator-down"])
def test_a_deleted_namespace_is_cleaned_up_and_a_recreated_one_starts_empty(
    is_up: bool, world: World, namespace: str, start: Start, undisturbed: Steps
) -> None:
    other = world.namespace(f"{namespace}-other")
    operator = start("leaver", QUIRE_WATCH_NAMESPACES=f"{namespace},{other}").wait_leading(world)
    for name in ("m", "n"):
        world.deploy(namespace, name, **CREATED)
        settled(world, namespace, name)
    if not is_up:
        operator.stop()

    gone = world.client.request("DELETE", f"/api/v1/namespaces/{namespace}")
    assert gone["status"]["phase"] == "Terminating"
    eventually("the namespace is gone", lambda: not exists(world, namespace))
    if not is_up:
        operator.start().wait_leading(world)

    world.deploy(other, "m", **CREATED)
    assert settled(world, other) == undisturbed["created"]
    writes = world.writes()
    world.namespace(namespace)  # the same name, another uid
    world.deploy(namespace, "m", **CREATED)
    assert settled(world, namespace) == undisturbed["created"]
    assert not any(what.endswith(f"{namespace}/n") for what in world.writes() - writes)
    assert operator.code is None and "Traceback" not in operator.tail(), operator.tail()


def exists(world: World, namespace: str) -> bool:
    try:
        world.client.request("GET", f"/api/v1/namespaces/{namespace}")
    except RefusedError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.chaos(
    11,
    fault="the CRD upgraded over an object that it calls invalid, and one with a field that went",
    proof="stored",
)
def test_an_invalid_stored_object_is_stalled_and_does_not_block_others(
    world: World, namespace: str, start: Start, undisturbed: Steps
) -> None:
    former: dict[str, Any] = copy.deepcopy(CRD)
    schema = former["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema.pop("x-kubernetes-validations", None)
    bad = {"resources": {"cpu": "lots", "memory": "2Gi"}, "engine": {"dtype": "float7"}}
    operator = start("upgraded", QUIRE_WATCH_NAMESPACES=namespace)
    try:
        install(world, former)
        eventually("the former schema is in force", lambda: accepts(world, namespace, bad))
        world.deploy(namespace, "bad", **bad)
        world.deploy(namespace, "m", **CREATED, formerField={"was": ["here", 1]})
        operator.wait_leading(world)
        world.wait_condition(namespace, "bad", "Stalled", "True")
    finally:
        install(world, CRD)
    eventually("the schema of now is in force", lambda: not accepts(world, namespace, bad))
    assert world.read("LLMDeployment", namespace, "bad")["spec"]["resources"]["cpu"] == "lots", "stored"

    operator.kill()
    operator.start().wait_leading(world)
    world.deploy(namespace, "good", **CREATED)
    settled(world, namespace, "good")
    assert settled(world, namespace) == undisturbed["created"]
    assert "formerField" not in world.read("LLMDeployment", namespace, "m")["spec"]
    condition = world.wait_condition(namespace, "bad", "Stalled", "True", "InvalidSpec")
    assert "cpu" in condition["message"]
    assert not world.find("Deployment", namespace, f"{NAME_LABEL}=bad")

    mended = {"resources": {"cpu": "1", "memory": "2Gi"}, "engine": None}
    world.patch("LLMDeployment", namespace, "bad", {"spec": mended})
    settled(world, namespace, "bad")
    world.wait_condition(namespace, "bad", "Stalled", "False")


def install(world: World, crd: Body) -> None:
    live = world.client.request("GET", CRD_PATH)
    version = live["metadata"]["resourceVersion"]
    body = {**crd, "metadata": {**crd["metadata"], "resourceVersion": version}}
    world.client.request("PUT", CRD_PATH, body)


def accepts(world: World, namespace: str, spec: Body) -> bool:
    model = {"model": {"source": {"pvc": {"claimName": "models"}}}, **spec}
    body = {
        "apiVersion": "serving.quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": model,
    }
    try:
        world.client.try_create(body)
    except RefusedError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.chaos(12, fault="the node under a model's pod is lost", proof="its pod is Terminating for ever")
def test_a_pod_on_a_lost_node_is_replaced_and_counted_once(
    world: World, namespace: str, start: Start
) -> None:
    start("bereft", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    world.deploy(namespace, "m", **CREATED)
    before = settled(world, namespace)
    (lost,) = eventually("a pod", lambda: world.find("Pod", namespace, f"{NAME_LABEL}=m"))
    path = f"/api/v1/namespaces/{namespace}/pods/{lost['metadata']['name']}"
    target = {"apiVersion": "v1", "kind": "Node", "name": "lost-node"}
    binding = {"metadata": {"name": lost["metadata"]["name"]}, "target": target}
    world.client.request("POST", f"{path}/binding", binding)
    world.patch("Pod", namespace, lost["metadata"]["name"], {"status": kubelet.ready()}, status=True)
    world.wait_condition(namespace, "m", "Ready", "True")

    # What the node controller does: first unready, then evicted. No kubelet reports its end.
    unready = {**kubelet.ready(), "conditions": [kubelet.condition("Ready", "False", reason="NodeNotReady")]}
    world.patch("Pod", namespace, lost["metadata"]["name"], {"status": unready}, status=True)
    world.wait_condition(namespace, "m", "Ready", "False")
    world.client.request("DELETE", path, {"gracePeriodSeconds": 30})
    eventually("another pod", lambda: pods(world, namespace, "m") - {lost["metadata"]["uid"]})
    assert len(world.find("Pod", namespace, f"{NAME_LABEL}=m")) == 2, "the lost one is Terminating"
    eventually("it counts one", lambda: world.status(namespace, "m").get("replicas") == 1)
    assert world.status(namespace, "m").get("readyReplicas", 0) == 0

    for pod in world.find("Pod", namespace, f"{NAME_LABEL}=m"):
        if pod["metadata"]["uid"] != lost["metadata"]["uid"]:
            world.patch("Pod", namespace, pod["metadata"]["name"], {"status": kubelet.ready()}, status=True)
    world.wait_condition(namespace, "m", "Ready", "True")
    status = world.status(namespace, "m")
    assert (status["replicas"], status["readyReplicas"]) == (1, 1), "none is counted twice"
    eventually("settled", lambda: is_settled(world, namespace))
    assert children(world, namespace, "m") == before
