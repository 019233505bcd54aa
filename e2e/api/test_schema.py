"""The CRD as the API server takes it: every rule, every default, every field."""

from __future__ import annotations

import pytest

from e2e.api import specs
from e2e.api.cases import CASES, Cases, Rule, rules
from e2e.api.client import Client, RefusedError
from quire_operator import spec
from quire_operator.plan import lost_fields

pytestmark = [pytest.mark.api, pytest.mark.timeout(300)]

LLM_DEPLOYMENTS = "/apis/serving.quire.dev/v1alpha1/namespaces/default/llmdeployments"
RULES = list(rules())


def test_the_crd_is_established_and_structural(api: Client) -> None:
    conditions = {c["type"]: c["status"] for c in api.crd()["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


def test_every_rule_has_cases_and_every_case_a_rule() -> None:
    assert {rule.id for rule in RULES} == set(CASES)
    assert all(cases.accepted and cases.refused for cases in CASES.values())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_accepts_what_it_should(api: Client, rule: Rule) -> None:
    for body in CASES[rule.id].accepted:
        api.try_create(body)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_refuses_what_it_should_and_says_what_to_do(api: Client, rule: Rule) -> None:
    cases: Cases = CASES[rule.id]
    for body in cases.refused:
        with pytest.raises(RefusedError) as refusal:
            api.try_create(body)
        message = str(refusal.value)
        assert cases.field in message
        assert rule.message.split(":")[-1].strip() in message, message


def test_defaults_of_the_api_server_are_those_of_the_operator(api: Client) -> None:
    """Every optional object given empty, so that defaulting reaches all of its fields."""
    defaulted = api.try_create(specs.minimal(**_optional_objects(specs.SPEC_SCHEMA)))["spec"]
    assert spec.parse({**specs.MINIMAL, "spec": defaulted}) == spec.parse(specs.MINIMAL)
    expected = specs.properties(spec.parse(specs.MINIMAL).spec)
    assert _leaves(defaulted) == _leaves(expected)


def test_the_status_starts_unobserved(api: Client) -> None:
    assert api.try_create(specs.minimal())["status"] == {"observedGeneration": -1}


@pytest.mark.parametrize(
    "body",
    [
        specs.FULL,
        specs.AUTOSCALED,
        specs.IDLING,
        specs.SHARDED,
        specs.SHARING,
        specs.ADAPTED,
        specs.EMBEDDING,
        *specs.DISAGGREGATED,
        *specs.DOWNLOADED,
    ],
    ids=specs.name_of,
)
def test_no_field_is_lost(api: Client, body: specs.Body) -> None:
    assert lost_fields(body, api.try_create(body)) == []


def test_defaults_of_autoscaling_are_those_of_the_operator(api: Client) -> None:
    """Not reached by the test before: maxReplicas is required."""
    least = specs.minimal(
        autoscaling={"maxReplicas": 4, "backend": "KEDA", "idle": {}, "fallback": {"replicas": 1}}
    )
    empty = specs.merged(least, {"spec": {"autoscaling": {"behavior": {"scaleUp": {}, "scaleDown": {}}}}})
    defaulted = api.try_create(empty)["spec"]["autoscaling"]
    expected = specs.properties(spec.parse(least).spec)["autoscaling"]
    assert _leaves(defaulted) == _leaves(expected)


def test_kubectl_scale_is_refused_where_an_autoscaler_decides(api: Client) -> None:
    api.create(specs.merged(specs.minimal(autoscaling={"maxReplicas": 4}), {"metadata": {"name": "auto"}}))
    path = "/apis/serving.quire.dev/v1alpha1/namespaces/default/llmdeployments/auto"
    with pytest.raises(RefusedError, match="only one of them can say how many pods there are"):
        api.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")


def test_a_shared_claim_keeps_its_class_and_its_access_mode(api: Client) -> None:
    body = specs.merged(specs.DOWNLOADED[4], {"metadata": {"name": "kept"}})
    api.create(body)
    path = "/apis/serving.quire.dev/v1alpha1/namespaces/default/llmdeployments/kept"
    refused: tuple[specs.Body, ...] = ({"storageClassName": "slow"}, {"accessMode": None})
    for cache in refused:
        with pytest.raises(RefusedError, match="a shared claim keeps them"):
            api.request("PATCH", path, {"spec": {"cache": cache}}, "application/merge-patch+json")
    elsewhere: specs.Body = {"mode": "PerReplica", "storageClassName": "slow", "accessMode": None}
    for cache in ({"size": "40Gi", "retainPolicy": "Delete"}, elsewhere):
        api.request("PATCH", path, {"spec": {"cache": cache}}, "application/merge-patch+json")


def test_a_field_that_does_not_exist_is_refused(api: Client) -> None:
    with pytest.raises(RefusedError, match="unknown field"):
        api.try_create(specs.minimal(trustRemoteCode=True))


@pytest.mark.parametrize("dtype", ["fp8", "FP4", ""])
def test_a_kv_cache_of_another_type_is_refused_by_name(api: Client, dtype: str) -> None:
    accepted = specs.minimal(engine={"kvCache": {"dtype": "Int8"}})
    assert api.try_create(accepted)["spec"]["engine"]["kvCache"]["dtype"] == "Int8"
    with pytest.raises(RefusedError, match=r"spec\.engine\.kvCache\.dtype"):
        api.try_create(specs.minimal(engine={"kvCache": {"dtype": dtype}}))


def test_the_scale_subresource_works_where_replicas_is_set(api: Client) -> None:
    api.create(specs.merged(specs.minimal(replicas=2), {"metadata": {"name": "scaled"}}))
    path = "/apis/serving.quire.dev/v1alpha1/namespaces/default/llmdeployments/scaled/scale"
    scale = api.request("GET", path)
    assert scale["spec"]["replicas"] == 2
    scale["spec"]["replicas"] = 5
    assert api.request("PUT", path, scale)["spec"]["replicas"] == 5


@pytest.mark.parametrize("fields", [{}, {"autoscaling": {"maxReplicas": 4}}, {"suspend": True}], ids=str)
def test_the_scale_subresource_answers_where_the_spec_gives_no_number(
    api: Client, fields: specs.Body
) -> None:
    name = f"unscaled-{'-'.join(fields) or 'minimal'}"
    api.create(specs.merged(specs.minimal(**fields), {"metadata": {"name": name}}))
    scale = api.request("GET", f"{LLM_DEPLOYMENTS}/{name}/scale")
    assert scale["spec"]["replicas"] == 1


def test_the_number_of_an_autoscaler_survives_an_apply_without_one(api: Client) -> None:
    """No field manager owns the default: an apply without the number does not set it again."""
    path = f"{LLM_DEPLOYMENTS}/owned"
    body = specs.merged(specs.minimal(), {"metadata": {"name": "owned"}})
    apply = "application/apply-patch+yaml"
    api.request("PATCH", f"{path}?fieldManager=gitops", body, apply)
    scale = api.request("GET", f"{path}/scale")
    scale["spec"]["replicas"] = 4
    api.request("PUT", f"{path}/scale?fieldManager=kube-controller-manager", scale)

    again = specs.merged(body, {"spec": {"engine": {"maxNumSeqs": 4}}})
    assert api.request("PATCH", f"{path}?fieldManager=gitops", again, apply)["spec"]["replicas"] == 4
    with pytest.raises(RefusedError, match="only one of them can say how many pods there are"):
        autoscaled = specs.merged(body, {"spec": {"autoscaling": {"maxReplicas": 4}}})
        api.request("PATCH", f"{path}?fieldManager=gitops", autoscaled, apply)


_MEANINGFUL = ("affinity", "chatTemplate")  # given empty they are not the same as absent


def _optional_objects(schema: specs.Body) -> specs.Body:
    """{} for every object that has nothing required, and the same within."""
    result = {}
    for name, inner in schema["properties"].items():
        if name in _MEANINGFUL:
            continue
        if inner.get("type") == "object" and "properties" in inner and not inner.get("required"):
            result[name] = _optional_objects(inner)
    return result


def _leaves(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {key: leaf for name in value for key, leaf in _leaves(value[name], f"{path}.{name}").items()}
    return {path: value}
