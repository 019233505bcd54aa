"""The HTTPRoute and the InferencePool select the serving pods, and adding one restarts no pod."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.errors import SpecError
from quire_operator.observed import Observed, Ref
from quire_operator.settings import Settings
from quire_operator.status import routing
from tests.operator.status.objects import model_body

SETTINGS = Settings(engine_image="engine:1")
PARENT = {"name": "shared", "namespace": "gateways"}
POOL = {"endpointPickerRef": {"name": "picker"}}


def children(**networking: Any) -> dict[str, Any]:
    model = spec.parse(specs.minimal(networking=networking))
    return {child["kind"]: child for child in resources.build(model, SETTINGS)}


def rule(**fields: Any) -> Any:
    (found,) = children(httpRoute={"parentRefs": [PARENT], **fields})["HTTPRoute"]["spec"]["rules"]
    return found


def test_no_route_and_no_pool_are_rendered_unless_requested() -> None:
    made = children(inferencePool={**POOL, "enabled": False})
    assert made.keys().isdisjoint({"HTTPRoute", "InferencePool"})


def published(**fields: Any) -> str:
    (match,) = rule(**fields)["matches"]
    assert match["path"]["type"] == "PathPrefix"
    return str(match["path"]["value"])


def test_a_path_prefix_is_removed_by_the_gateway() -> None:
    assert "filters" not in rule()
    (rewrite,) = rule(path="/team/m")["filters"]
    assert rewrite["urlRewrite"]["path"] == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}
    assert published(path="/team/m") == "/team/m/v1"


def test_the_api_is_published_and_metrics_and_health_are_not() -> None:
    assert published() == "/v1"


def routed_names(**spec_fields: Any) -> list[list[str]]:
    """The names that each rule of a route matches, by their header."""
    route = {"parentRefs": [PARENT], "modelHeader": "X-Gateway-Model-Name"}
    model = spec.parse(specs.minimal(networking={"httpRoute": route}, **spec_fields))
    (made,) = [one for one in resources.build(model, SETTINGS) if one["kind"] == "HTTPRoute"]
    found = []
    for each in made["spec"]["rules"]:
        assert all(match["path"] == {"type": "PathPrefix", "value": "/v1"} for match in each["matches"])
        headers = [header for match in each["matches"] for header in match["headers"]]
        assert {(one["type"], one["name"]) for one in headers} == {("Exact", "X-Gateway-Model-Name")}
        assert each["backendRefs"] == made["spec"]["rules"][0]["backendRefs"]
        found.append([one["value"] for one in headers])
    return found


def test_a_route_by_a_models_name_has_its_names_and_those_of_its_adapters() -> None:
    model = {**specs.MINIMAL["spec"]["model"], "servedName": "org/m", "aliases": ["m"]}
    assert routed_names(model=model) == [["org/m", "m"]]
    source = {"huggingFace": {"repo": "org/adapter"}}
    adapters = [{"name": f"a{number}", "source": source} for number in range(64)]
    several = routed_names(model=model, adapters=adapters, engine={"maxAdapters": 1})
    assert [len(one) for one in several] == [64, 2], "a rule has up to 64 matches"
    assert [name for one in several for name in one] == ["org/m", "m", *(one["name"] for one in adapters)]


def test_beside_a_rewritten_path_each_name_has_a_rule_and_too_many_names_are_refused() -> None:
    route = {"parentRefs": [PARENT], "modelHeader": "X-Model", "path": "/team/m"}
    aliases = [f"alias-{number}" for number in range(16)]

    def rules(count: int) -> Any:
        model = {**specs.MINIMAL["spec"]["model"], "aliases": aliases[:count]}
        parsed = spec.parse(specs.minimal(networking={"httpRoute": route}, model=model))
        (made,) = [one for one in resources.build(parsed, SETTINGS) if one["kind"] == "HTTPRoute"]
        return made["spec"]["rules"]

    assert [len(rule["matches"]) for rule in rules(15)] == [1] * 16
    with pytest.raises(SpecError, match="httpRoute.path: .* at most 16 names, and there are 17"):
        rules(16)


def test_the_backend_of_the_route_is_the_inference_pool_where_enabled_and_else_the_service() -> None:
    made = children(httpRoute={"parentRefs": [PARENT]}, inferencePool=POOL)
    (backend,) = made["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["kind"] == "InferencePool"
    assert rule()["backendRefs"] == [{"kind": "Service", "name": "minimal", "port": 80}]
    assert made["InferencePool"]["spec"]["selector"]["matchLabels"] == names.selector_labels("minimal")


@pytest.mark.parametrize("parents", [[], [PARENT, {**PARENT, "sectionName": "https"}]])
def test_empty_or_duplicate_parent_refs_are_refused(parents: Any) -> None:
    with pytest.raises(SpecError, match="httpRoute.parentRefs: (give each Gateway once|fewer than 1)"):
        spec.parse(specs.minimal(networking={"httpRoute": {"parentRefs": parents}}))


def test_the_pool_and_the_route_are_applied_after_the_deployment() -> None:
    model = spec.parse(
        specs.minimal(networking={"httpRoute": {"parentRefs": [PARENT]}, "inferencePool": POOL})
    )
    made = resources.build(model, SETTINGS)
    applied = resources.with_revision(made, resources.render_revision(model, {}, made))
    for order in (made, applied):
        assert [m["kind"] for m in order][-3:] == ["Deployment", "InferencePool", "HTTPRoute"]


def test_adding_a_route_creates_no_new_revision() -> None:
    body = specs.merged(specs.MINIMAL, {"metadata": {"uid": "u"}})
    model = spec.parse(body)
    kept = resources.render_revision(model, body["spec"], resources.build(model, SETTINGS))
    routed = specs.merged(body, {"spec": {"networking": {"httpRoute": {"parentRefs": [PARENT]}}}})
    closed = specs.merged(body, {"spec": {"networking": {"networkPolicy": {"mode": "None"}}}})
    assert resources.renders_same_pods(spec.parse(routed), routed, kept)
    assert not resources.renders_same_pods(spec.parse(closed), closed, kept)


def reported(accepted: str, refs: str = "True", **of: Any) -> dict[str, Any]:
    conditions = [
        {"type": "Accepted", "status": accepted, "reason": "R", "message": "m\x1b", **of},
        {"type": "ResolvedRefs", "status": refs, "reason": "R", "message": "m", **of},
    ]
    return {"parentRef": PARENT, "conditions": conditions}


@pytest.mark.parametrize(
    ("parents", "missing", "expected"),
    [
        ([], {"HTTPRoute"}, ("False", "MissingCRD")),
        ([], set(), ("Unknown", "AwaitingGateway")),
        ([reported("True")], set(), ("Unknown", "AwaitingGateway")),
        ([reported("True"), reported("True")], set(), ("True", "RouteAccepted")),
        ([reported("True"), reported("False")], set(), ("False", "RouteNotAccepted")),
        ([reported("True"), reported("True", refs="False")], set(), ("False", "RouteNotAccepted")),
        ([reported("True"), reported("True", observedGeneration=2)], set(), ("True", "RouteAccepted")),
        ([reported("True"), reported("True", observedGeneration=1)], set(), ("Unknown", "AwaitingGateway")),
        ([reported("True"), reported("False", observedGeneration=1)], set(), ("Unknown", "AwaitingGateway")),
    ],
)
def test_the_routed_condition_combines_the_reports_of_all_gateways(
    parents: Any, missing: set[str], expected: Any
) -> None:
    body = model_body(networking={"httpRoute": {"parentRefs": [PARENT, {"name": "local"}]}})
    route = {"metadata": {"generation": 2}, "status": {"parents": parents}}
    observed = Observed(body=body, children={Ref("HTTPRoute", "m"): route}, missing=frozenset(missing))

    decided = routing.condition(spec.parse(body), observed)

    assert decided is not None and decided[:2] == expected and decided[2].isprintable()
