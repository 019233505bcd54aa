"""Pods get the accelerator of the profile and run on its nodes; spot nodes are preferred or required."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import profiles, specs
from quire_operator import resources, spec
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="quire-server:1")
REF = {"profileRef": {"name": "h100", "memoryPercent": 85}}
LATER = "DuringSchedulingIgnoredDuringExecution"
LABELS = {
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "karpenter.sh/capacity-type": "spot",
    "kubernetes.azure.com/scalesetpriority": "spot",
}


def deployment(**fields: Any) -> specs.Body:
    body = specs.minimal(**fields)
    return resources.build(spec.parse(body), SETTINGS, profile=profiles.named_by(body))[-1]


def pod(**fields: Any) -> specs.Body:
    template: specs.Body = deployment(**fields)["spec"]["template"]["spec"]
    return template


def test_a_profile_gives_the_pod_its_accelerator_and_its_nodes() -> None:
    found = pod(resources=REF)

    assert found["containers"][0]["resources"]["limits"]["example.com/h100"] == "1"
    assert found["nodeSelector"] == {"example.com/gpu": "h100", "disktype": "hdd"}
    assert found["tolerations"] == profiles.FULL["spec"]["tolerations"]
    assert found["runtimeClassName"] == "nvidia"


def test_what_the_llm_deployment_says_is_added_and_wins() -> None:
    own = {"key": "mine", "operator": "Exists"}
    first = profiles.FULL["spec"]["tolerations"][0]
    scheduling: specs.Body = {"nodeSelector": {"disktype": "ssd"}, "runtimeClassName": "gvisor"}
    scheduling["tolerations"] = [own, first]

    found = pod(resources=REF, scheduling=scheduling)

    assert found["nodeSelector"] == {"example.com/gpu": "h100", "disktype": "ssd"}
    assert found["runtimeClassName"] == "gvisor"
    assert found["tolerations"] == [own, *profiles.FULL["spec"]["tolerations"]], "none of them twice"


def test_the_server_is_reported_a_gpu_whether_by_profile_or_by_name() -> None:
    for given in (REF, {"gpu": {"memoryPercent": 85}}):
        model = spec.parse(specs.minimal(resources=given))
        built = resources.build(model, SETTINGS)
        (settings,) = [child["data"] for child in built if child["kind"] == "ConfigMap"]
        assert (settings["QUIRE_DEVICE"], settings["QUIRE_GPU_MEMORY_UTILIZATION"]) == ("cuda", "0.85")


def test_a_queue_is_on_the_deployment_and_not_in_what_rolls_pods() -> None:
    with_queue, without = deployment(scheduling={"queueName": "team-a"}), deployment()

    assert with_queue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert with_queue["spec"] == without["spec"]
    assert "kueue.x-k8s.io/queue-name" not in without["metadata"]["labels"]


def test_spot_nodes_are_preferred_by_every_label_that_providers_give_them() -> None:
    found = pod(scheduling={"spot": {"enabled": True}})["affinity"]["nodeAffinity"]

    (kind,) = found
    assert kind.startswith("preferred")
    reported = [term["preference"]["matchExpressions"][0] for term in found[kind]]
    assert {expression["key"]: expression["values"][0] for expression in reported} == LABELS


def test_without_a_fallback_each_alternative_of_the_users_is_required_on_spot_nodes() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    own = {"nodeAffinity": {f"required{LATER}": {"nodeSelectorTerms": terms}}}
    spot = {"enabled": True, "fallbackToOnDemand": False}

    found = pod(scheduling={"spot": spot, "affinity": own})["affinity"]["nodeAffinity"]

    required = found[f"required{LATER}"]["nodeSelectorTerms"]
    reported = {tuple((e["key"], e["values"][0]) for e in term["matchExpressions"]) for term in required}
    assert reported == {(("zone", zone), label) for zone in "ab" for label in LABELS.items()}


def test_no_taint_that_takes_a_node_back_is_tolerated() -> None:
    tolerations = pod(scheduling={"spot": {"enabled": True}})["tolerations"]

    assert tolerations
    assert all(each["effect"] == "NoSchedule" for each in tolerations)


@pytest.mark.parametrize(
    "affinity",
    [
        {"nodeAffinity": 7},
        {"nodeAffinity": {f"required{LATER}": 7}},
        {"nodeAffinity": {f"required{LATER}": {"nodeSelectorTerms": 7}}},
        {"nodeAffinity": {f"required{LATER}": {"nodeSelectorTerms": [{"matchExpressions": 7}]}}},
        {"nodeAffinity": {f"preferred{LATER}": 7}},
    ],
)
@pytest.mark.parametrize("fallback", [True, False])
def test_an_affinity_that_is_none_is_left_for_the_api_server_to_refuse(affinity: Any, fallback: bool) -> None:
    spot = {"enabled": True, "fallbackToOnDemand": fallback}

    found = pod(scheduling={"spot": spot, "affinity": affinity})["affinity"]["nodeAffinity"]

    assert "7" in str(found)
