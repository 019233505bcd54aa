"""Prefill pods beside decode pods: what each role has of its own, and what both share."""

from __future__ import annotations

import re
from typing import Any

import pytest

from e2e.api import profiles, specs
from quire_operator import names, resources, spec
from quire_operator.errors import SpecError
from quire_operator.observed import Ref, ref
from quire_operator.settings import Settings

SETTINGS = Settings(engine_image="registry.example/quire-server:1", load_url="http://adapter:8080/load")
SIZES, SCALED, ON_GPUS, _ = specs.DISAGGREGATED
Body = dict[str, Any]


def children(body: Body) -> dict[Ref, Body]:
    made = resources.build(spec.parse(body), SETTINGS, **profiles.named_by(body))
    return {ref(child): child for child in made}


def settings_of(body: Body, name: str) -> list[Body]:
    """The environment of the servers of decode pods, and of prefill pods."""
    made = children(body)
    found = []
    for each in (name, f"{name}-prefill"):
        pod = made[Ref("Deployment", each)]["spec"]["template"]["spec"]
        found.append(made[Ref("ConfigMap", pod["containers"][0]["envFrom"][0]["configMapRef"]["name"])])
    return [one["data"] for one in found]


def roles_of(body: Body, kind: str, name: str) -> tuple[Body, Body]:
    """The child of that kind of the decode pods, and that of the prefill pods."""
    made = children(body)
    return made[Ref(kind, name)], made[Ref(kind, f"{name}-prefill")]


def test_clients_reach_decode_pods_and_decode_pods_find_prefill_pods_by_name() -> None:
    public, headless = roles_of(SIZES, "Service", "disaggregated")
    decode, prefill = roles_of(SIZES, "Deployment", "disaggregated")

    for service, deployment in ((public, decode), (headless, prefill)):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert public["spec"]["selector"] != headless["spec"]["selector"]
    assert headless["spec"]["clusterIP"] == "None"
    (port,) = headless["spec"]["ports"]
    ports = prefill["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert port["targetPort"] in [one["name"] for one in ports]


def test_decode_pods_keep_the_selector_that_pods_have_without_roles() -> None:
    """A Deployment's selector is immutable, so that roles can be given to an LLMDeployment that serves."""
    before = children(specs.minimal())
    after = children(specs.minimal(disaggregation={"prefill": {}}))
    for kind in ("Deployment", "Service", "PodDisruptionBudget"):
        selector = before[Ref(kind, "minimal")]["spec"]["selector"]
        assert after[Ref(kind, "minimal")]["spec"]["selector"] == selector


def test_each_role_has_its_number_and_its_resources() -> None:
    decode, prefill = roles_of(SIZES, "Deployment", "disaggregated")

    def asked(deployment: Body) -> tuple[int, str, str]:
        requests = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
        return deployment["spec"]["replicas"], requests["cpu"], requests["memory"]

    assert asked(decode) == (3, "2", "6Gi")
    assert asked(prefill) == (2, "4", "4Gi")


def test_a_role_without_its_own_has_those_of_the_spec() -> None:
    body = specs.minimal(disaggregation={"prefill": {}}, replicas=2)
    decode, prefill = roles_of(body, "Deployment", "minimal")

    assert (decode["spec"]["replicas"], prefill["spec"]["replicas"]) == (2, 1)
    (first, second) = (
        one["spec"]["template"]["spec"]["containers"][0]["resources"] for one in (decode, prefill)
    )
    assert first == second


def test_prefill_pods_without_their_own_have_those_of_the_spec_and_not_those_of_decode_pods() -> None:
    own = {"cpu": "8", "memory": "9Gi"}
    body = specs.minimal(
        disaggregation={"prefill": {}, "decode": {"resources": own}}, resources={"cpu": "3", "memory": "4Gi"}
    )
    found = [
        one["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
        for one in roles_of(body, "Deployment", "minimal")
    ]
    assert [(one["cpu"], one["memory"]) for one in found] == [("8", "9Gi"), ("3", "4Gi")]


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        ("Auto", {}),
        ("TCP", {"QUIRE_KV_TRANSPORT": "tcp"}),
        ("NIXL", {"QUIRE_KV_TRANSPORT": "nixl", "UCX_TCP_PORT_RANGE": "7603-7634"}),
    ],
)
def test_both_roles_have_the_transport_and_nixl_the_ports_that_the_policy_opens(
    transport: str, settings: dict[str, str]
) -> None:
    made = children(specs.minimal(disaggregation={"prefill": {}, "transport": transport}))

    found = [child["data"] for target, child in made.items() if target.kind == "ConfigMap"]
    found = [data for data in found if "QUIRE_KV_ROLE" in data]
    assert len(found) == 2
    for data in found:
        assert {key: data[key] for key in data if "TRANSPORT" in key or "UCX" in key} == settings
    first, _, last = settings.get("UCX_TCP_PORT_RANGE", "").partition("-")
    opened = [
        (str(port["port"]), str(port["endPort"]))
        for name in ("minimal", "minimal-prefill")
        for rule in made[Ref("NetworkPolicy", name)]["spec"]["ingress"]
        for port in rule["ports"]
        if "endPort" in port
    ]
    assert opened == ([(first, last)] * 2 if first else [])


@pytest.mark.parametrize("off", [{"suspend": True}, {"replicas": 0}])
def test_while_no_decode_pod_is_wanted_no_prefill_pod_is(off: Body) -> None:
    scaling = {"prefill": {"autoscaling": {"maxReplicas": 3}}}
    made = children(specs.minimal(disaggregation=scaling, **off))

    assert [made[Ref("Deployment", n)]["spec"]["replicas"] for n in ("minimal", "minimal-prefill")] == [0, 0]
    assert not [target for target in made if target.kind == "HorizontalPodAutoscaler"]


def test_prefill_pods_are_scaled_by_their_queue_and_decode_pods_by_queue_and_kv_cache() -> None:
    decode, prefill = roles_of(SCALED, "HorizontalPodAutoscaler", "disaggregated-autoscaled")

    def metrics(autoscaler: Body) -> dict[str, str]:
        found = [one["object"] for one in autoscaler["spec"]["metrics"]]
        return {one["metric"]["name"]: one["target"]["averageValue"] for one in found}

    assert metrics(decode) == {"llm_queue_depth": "10", "llm_kv_cache_utilization": "800m"}
    assert metrics(prefill) == {"llm_prefill_queue_depth": "10"}
    for autoscaler in (decode, prefill):
        name = autoscaler["metadata"]["name"]
        assert autoscaler["spec"]["scaleTargetRef"]["name"] == name
    assert (prefill["spec"]["minReplicas"], prefill["spec"]["maxReplicas"]) == (2, 5)


def test_both_autoscalers_have_the_speed_that_the_spec_gives() -> None:
    behavior = {"scaleUp": {"pods": 3}, "scaleDown": {"stabilizationWindowSeconds": 7}}
    body = specs.merged(SCALED, {"spec": {"autoscaling": {"behavior": behavior}}})
    decode, prefill = roles_of(body, "HorizontalPodAutoscaler", "disaggregated-autoscaled")

    assert decode["spec"]["behavior"] == prefill["spec"]["behavior"]
    assert prefill["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 7


def test_keda_scales_decode_pods_while_prefill_pods_have_a_plain_autoscaler() -> None:
    made = children(specs.merged(SCALED, {"spec": {"autoscaling": {"backend": "KEDA"}}}))

    scalers = {t for t in made if t.kind in ("ScaledObject", "HorizontalPodAutoscaler")}
    assert scalers == {
        Ref("ScaledObject", "disaggregated-autoscaled"),
        Ref("HorizontalPodAutoscaler", "disaggregated-autoscaled-prefill"),
    }


def test_both_roles_share_account_model_and_keys_and_drain_alike() -> None:
    secured = specs.merged(SIZES, {"spec": {"security": {"apiKeysSecretRef": {"name": "keys"}}}})
    decode, prefill = (
        one["spec"]["template"]["spec"] for one in roles_of(secured, "Deployment", "disaggregated")
    )

    for field in ("serviceAccountName", "terminationGracePeriodSeconds", "volumes", "securityContext"):
        assert decode[field] == prefill[field]
    assert {"name": "api-keys", "secret": {"secretName": "keys"}} in prefill["volumes"]
    first, second = decode["containers"][0], prefill["containers"][0]
    for field in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "volumeMounts", "args"):
        assert first[field] == second[field]


def test_the_transfer_port_is_open_to_decode_pods_of_the_same_llmdeployment_only() -> None:
    decode, prefill = roles_of(SIZES, "NetworkPolicy", "disaggregated")

    def peers(rules: list[Body], side: str) -> list[Any]:
        ports = [names.PORT_KV_TRANSFER]
        return [r[side] for r in rules if [p["port"] for p in r["ports"]] == ports]

    of_role = [
        [{"podSelector": {"matchLabels": names.selector_labels("disaggregated", role)}}]
        for role in (names.ROLE_LEADER, names.ROLE_PREFILL)
    ]
    assert peers(prefill["spec"]["ingress"], "from") == [of_role[0]]
    assert peers(decode["spec"]["egress"], "to") == [of_role[1]]
    assert not peers(decode["spec"]["ingress"], "from") and not peers(prefill["spec"]["egress"], "to")
    assert [r for r in prefill["spec"]["ingress"] if {"podSelector": {}} in r["from"]] == []


def test_a_selector_of_all_roles_finds_the_pods_of_both() -> None:
    found = re.fullmatch(
        r"serving\.quire\.dev/name=disaggregated,serving\.quire\.dev/role in \((.*)\)",
        names.selector_of_all_roles("disaggregated"),
    )
    assert found is not None
    for deployment in roles_of(SIZES, "Deployment", "disaggregated"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels[names.LABEL_NAME] == "disaggregated"
        assert labels[names.LABEL_ROLE] in found[1].split(",")


def test_each_role_has_its_ranks_and_without_its_own_those_of_the_spec() -> None:
    def sizes(own: Body) -> list[tuple[str, str]]:
        """(tensor, pipeline) of decode and prefill pods, as their servers get them."""
        made = children(specs.minimal(resources={"cpu": "8"}, parallelism={"tensor": 2}, disaggregation=own))
        found = []
        for name in ("minimal", "minimal-prefill"):
            pod = made[Ref("Deployment", name)]["spec"]["template"]["spec"]
            settings = pod["containers"][0]["envFrom"][0]["configMapRef"]["name"]
            data = made[Ref("ConfigMap", settings)]["data"]
            flags = ("QUIRE_TENSOR_PARALLEL_SIZE", "QUIRE_PIPELINE_PARALLEL_SIZE")
            found.append(tuple(data.get(flag, "1") for flag in flags))
        return found

    assert sizes({"prefill": {}}) == [("2", "1"), ("2", "1")]
    assert sizes({"prefill": {"parallelism": {"tensor": 4, "pipeline": 2}}}) == [("2", "1"), ("4", "2")]
    assert sizes({"prefill": {}, "decode": {"parallelism": {}}}) == [("1", "1"), ("2", "1")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_another_number_of_ranks_replaces_pods(role: str) -> None:
    """A rollback compares specs: the ranks of both roles are part of what pods are rendered for."""

    def pods(tensor: int) -> list[Body]:
        body = specs.minimal(
            resources={"cpu": "8"}, disaggregation={"prefill": {}, role: {"parallelism": {"tensor": tensor}}}
        )
        return [one["spec"]["template"] for one in roles_of(body, "Deployment", "minimal")]

    (decode, prefill), (other_decode, other_prefill) = pods(2), pods(4)
    assert (decode == other_decode, prefill == other_prefill) == (role == "prefill", role == "decode")


def test_each_role_has_its_own_gpus_one_for_each_rank_and_the_memory_that_stages_their_blocks() -> None:
    decode, prefill = roles_of(ON_GPUS, "Deployment", "disaggregated-gpus")
    limits = [
        one["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for one in (decode, prefill)
    ]
    assert limits == [
        {"memory": "64Gi", "nvidia.com/h200": "1"},
        {"memory": "96Gi", "example.com/h100": "2"},
    ]
    found = settings_of(ON_GPUS, "disaggregated-gpus")
    assert [one["QUIRE_KV_STAGING_BYTES"] for one in found] == [str(8 << 30)] * 2
    assert [one["QUIRE_DEVICE"] for one in found] == ["cuda", "cuda"]
    assert [one["QUIRE_GPU_MEMORY_UTILIZATION"] for one in found] == ["0.92", "0.88"]


def test_a_role_without_an_accelerator_of_its_own_has_that_of_the_spec() -> None:
    body = specs.minimal(
        resources={"cpu": "2", "memory": "8Gi", "gpu": {}},
        disaggregation={
            "prefill": {"resources": {"cpu": "2", "memory": "9Gi"}},
            "decode": {"resources": {"cpu": "2", "memory": "9Gi", "profileRef": {"name": "h100"}}},
        },
    )
    decode, prefill = (
        one["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for one in roles_of(body, "Deployment", "minimal")
    )
    assert decode == {"memory": "9Gi", "example.com/h100": "1"}
    assert prefill == {"memory": "9Gi", "nvidia.com/gpu": "1"}


def test_on_cpus_nothing_is_staged() -> None:
    for data in settings_of(SIZES, "disaggregated"):
        assert data["QUIRE_DEVICE"] == "cpu" and "QUIRE_KV_STAGING_BYTES" not in data


def test_one_role_on_a_gpu_and_the_other_on_a_cpu_is_refused_in_one_sentence() -> None:
    own = {"cpu": "1", "memory": "8Gi", "gpu": {}}
    for roles in ({"prefill": {"resources": own}}, {"prefill": {}, "decode": {"resources": own}}):
        with pytest.raises(SpecError, match="of a GPU and of a CPU differ in format: give both roles a GPU"):
            spec.parse(specs.minimal(disaggregation=roles))
