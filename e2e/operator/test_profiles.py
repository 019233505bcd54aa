"""An AcceleratorProfile with the rights of the chart: awaited, rendered, and compared with the model."""

from __future__ import annotations

import pytest

from e2e.api import profiles
from e2e.operator import pods
from e2e.operator.statusz import LLAMA_2_13B, statusz_server
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

PATH = "/apis/serving.quire.dev/v1alpha1/acceleratorprofiles"


def test_a_missing_profile_is_awaited_and_its_change_alone_changes_no_pod_template(
    world: World, namespace: str
) -> None:
    resources = {"cpu": "1", "memory": "2Gi", "profileRef": {"name": namespace}}
    world.deploy(namespace, "m", resources=resources)
    missing = world.wait_condition(namespace, "m", "Ready", "False", "ProfileNotFound")
    assert f"there is no {namespace}" in missing["message"]

    profile = profiles.profile(resourceName="example.com/one")
    world.client.create({**profile, "metadata": {"name": namespace}})
    eventually("its children", lambda: world.has_children(namespace, "m"))
    before = world.read("Deployment", namespace, "m")["spec"]["template"]
    assert before["spec"]["containers"][0]["resources"]["limits"]["example.com/one"] == "1"

    change = {"spec": {"resourceName": "example.com/two"}}
    world.client.request("PATCH", f"{PATH}/{namespace}", change, "application/merge-patch+json")
    world.patch("LLMDeployment", namespace, "m", {"spec": {"replicas": 2}})
    eventually("it is seen", lambda: world.status(namespace, "m").get("availableRenderRevision"))
    assert world.read("Deployment", namespace, "m")["spec"]["template"] == before

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxModelLen": 4096}}})
    eventually(
        "the next change of the spec takes it up",
        lambda: "example.com/two" in str(world.read("Deployment", namespace, "m")["spec"]["template"]),
    )
    world.wait_events(namespace, "m", "ProfileNotFound")


def test_a_model_that_does_not_fit_is_reported_with_numbers_while_it_loads(
    world: World, namespace: str
) -> None:
    world.client.create({**profiles.profile(memory="80G"), "metadata": {"name": namespace}})
    with statusz_server({"phase": "loading", "config": LLAMA_2_13B}) as pod:
        resources = {"cpu": "1", "memory": "96Gi", "profileRef": {"name": namespace}}
        world.deploy(namespace, "m", resources=resources, engine={"maxModelLen": 4096})
        world.make_pod(namespace, "m", pods.loading(ip=pod.ip))
        fewer = world.wait_condition(namespace, "m", "FitsAccelerator", "False", "FitsFewer")
        world.wait_events(namespace, "m", "FitsFewer")

    assert "13 requests of 4,096 tokens fit at once" in fewer["message"]
    assert world.condition(namespace, "m", "Degraded")["status"] == "False"

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxNumSeqs": 8}}})
    world.wait_condition(namespace, "m", "FitsAccelerator", "True", "Fits")
    patch = {"spec": {"memory": "24G"}}
    world.client.request("PATCH", f"{PATH}/{namespace}", patch, "application/merge-patch+json")
    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxNumSeqs": 4}}})
    world.wait_condition(namespace, "m", "FitsAccelerator", "False", "DoesNotFit")
    world.wait_event(namespace, "m", "DoesNotFit")
