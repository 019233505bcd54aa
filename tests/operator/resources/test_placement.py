"""Pods get the accelerator of the profile and run on its nodes; spot nodes are preferred or required."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import profiles, specs
from quire_operator import resources, spec
from quire_operator.errors import SpecError
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
    return resources.build(spec.parse(body), SETTINGS, **profiles.named_by(body))[-1]


def pod(**fields: Any) -> specs.Body:
    template: specs.Body = deployment(**fields)["spec"]["template"]["spec"]
    return template


def test_a_profile_sets_the_accelerator_node_selector_tolerations_and_runtime_class_of_the_pod() -> None:
    found = pod(resources=REF)

    assert found["containers"][0]["resources"]["limits"]["example.com/h100"] == "1"
    assert found["nodeSelector"] == {"example.com/gpu": "h100", "disktype": "hdd"}
    assert found["tolerations"] == profiles.FULL["spec"]["tolerations"]
    assert found["runtimeClassName"] == "nvidia"


def test_every_pod_of_a_group_has_the_accelerators_of_its_ranks_and_the_placement_of_the_profile() -> None:
    sizes = {"tensor": 8, "pipeline": 4, "nodes": 4}
    template = deployment(resources={"cpu": "16", **REF}, parallelism=sizes)["spec"]["leaderWorkerTemplate"]

    assert template["size"] == 4
    for pod in (template[f"{role}Template"]["spec"] for role in ("leader", "worker")):
        assert pod["containers"][0]["resources"]["limits"]["example.com/h100"] == "8", "32 ranks, 4 nodes"
        assert pod["nodeSelector"] == profiles.FULL["spec"]["nodeSelector"]
        assert pod["tolerations"] == profiles.FULL["spec"]["tolerations"]
        assert pod["runtimeClassName"] == "nvidia"
        (apart,) = pod["affinity"]["podAntiAffinity"][f"required{LATER}"]
        assert apart["topologyKey"] == "kubernetes.io/hostname", "two of them would share its network"
        (memory,) = [volume for volume in pod["volumes"] if volume["name"] == "shared-memory"]
        assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}, "that NCCL exchanges through"


def test_scheduling_in_the_llmdeployment_is_merged_with_the_profile_and_takes_precedence() -> None:
    own = {"key": "mine", "operator": "Exists"}
    first = profiles.FULL["spec"]["tolerations"][0]
    scheduling: specs.Body = {"nodeSelector": {"disktype": "ssd"}, "runtimeClassName": "gvisor"}
    scheduling["tolerations"] = [own, first]

    found = pod(resources=REF, scheduling=scheduling)

    assert found["nodeSelector"] == {"example.com/gpu": "h100", "disktype": "ssd"}
    assert found["runtimeClassName"] == "gvisor"
    assert found["tolerations"] == [own, *profiles.FULL["spec"]["tolerations"]], "none of them twice"


def test_the_server_runs_on_cuda_with_a_profile_and_with_an_explicit_gpu() -> None:
    for given in (REF, {"gpu": {"memoryPercent": 85}}):
        model = spec.parse(specs.minimal(resources=given))
        built = resources.build(model, SETTINGS)
        (settings,) = [child["data"] for child in built if child["kind"] == "ConfigMap"]
        assert (settings["QUIRE_DEVICE"], settings["QUIRE_GPU_MEMORY_UTILIZATION"]) == ("cuda", "0.85")


def test_a_queue_name_labels_the_deployment_and_leaves_its_spec_unchanged() -> None:
    with_queue, without = deployment(scheduling={"queueName": "team-a"}), deployment()

    assert with_queue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert with_queue["spec"] == without["spec"]
    assert "kueue.x-k8s.io/queue-name" not in without["metadata"]["labels"]


def test_spot_nodes_are_preferred_by_the_label_of_each_provider() -> None:
    found = pod(scheduling={"spot": {"enabled": True}})["affinity"]["nodeAffinity"]

    (kind,) = found
    assert kind.startswith("preferred")
    reported = [term["preference"]["matchExpressions"][0] for term in found[kind]]
    assert {expression["key"]: expression["values"][0] for expression in reported} == LABELS


def test_without_fallback_every_node_selector_term_of_the_user_also_requires_a_spot_label() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    own = {"nodeAffinity": {f"required{LATER}": {"nodeSelectorTerms": terms}}}
    spot = {"enabled": True, "fallbackToOnDemand": False}

    found = pod(scheduling={"spot": spot, "affinity": own})["affinity"]["nodeAffinity"]

    required = found[f"required{LATER}"]["nodeSelectorTerms"]
    reported = {tuple((e["key"], e["values"][0]) for e in term["matchExpressions"]) for term in required}
    assert reported == {(("zone", zone), label) for zone in "ab" for label in LABELS.items()}


def test_the_spot_tolerations_cover_no_schedule_taints_only() -> None:
    tolerations = pod(scheduling={"spot": {"enabled": True}})["tolerations"]

    assert tolerations
    assert all(each["effect"] == "NoSchedule" for each in tolerations)


@pytest.mark.parametrize(
    ("affinity", "path"),
    [
        ({"nodeAffinity": 7}, "nodeAffinity"),
        ({"nodeAffinity": {f"required{LATER}": 7}}, f"nodeAffinity.required{LATER}"),
        (
            {"nodeAffinity": {f"required{LATER}": {"nodeSelectorTerms": []}}},
            f"nodeAffinity.required{LATER}.nodeSelectorTerms",
        ),
        ({"nodeAffinity": {f"preferred{LATER}": 7}}, f"nodeAffinity.preferred{LATER}"),
        ({"podAffinity": {"x": [[[[]]]]}}, "podAffinity.x"),
    ],
)
def test_a_malformed_affinity_is_refused_with_the_path_of_the_field(affinity: Any, path: str) -> None:
    with pytest.raises(SpecError, match=f"spec.scheduling.affinity.{path}: "):
        pod(scheduling={"affinity": affinity})
