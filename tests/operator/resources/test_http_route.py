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


def test_without_a_wish_there_is_no_route() -> None:
    made = children(inferencePool={**POOL, "enabled": False})
    assert made.keys().isdisjoint({"HTTPRoute", "InferencePool"})


def test_a_prefix_is_taken_off_before_the_server_sees_it() -> None:
    assert "filters" not in rule()
    (rewrite,) = rule(path="/team/m")["filters"]
    assert rewrite["urlRewrite"]["path"] == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}


def test_the_route_leads_to_the_pool_where_there_is_one() -> None:
    made = children(httpRoute={"parentRefs": [PARENT]}, inferencePool=POOL)
    (backend,) = made["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert backend["kind"] == "InferencePool"
    assert rule()["backendRefs"] == [{"kind": "Service", "name": "minimal", "port": 80}]
    assert made["InferencePool"]["spec"]["selector"]["matchLabels"] == names.selector_labels("minimal")


@pytest.mark.parametrize("parents", [[], [PARENT, {**PARENT, "sectionName": "https"}]])
def test_each_gateway_is_given_once_and_one_at_least(parents: Any) -> None:
    with pytest.raises(SpecError, match="httpRoute.parentRefs: give each Gateway once"):
        spec.parse(specs.minimal(networking={"httpRoute": {"parentRefs": parents}}))


def test_a_route_that_is_refused_hinders_no_pod() -> None:
    model = spec.parse(
        specs.minimal(networking={"httpRoute": {"parentRefs": [PARENT]}, "inferencePool": POOL})
    )
    made = resources.build(model, SETTINGS)
    applied = resources.with_revision(made, resources.render_revision(model, {}, made))
    for order in (made, applied):
        assert [m["kind"] for m in order][-3:] == ["Deployment", "InferencePool", "HTTPRoute"]


def test_asking_for_a_route_is_no_other_spec_of_the_pods() -> None:
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
def test_routed_says_what_every_gateway_says(parents: Any, missing: set[str], expected: Any) -> None:
    body = model_body(networking={"httpRoute": {"parentRefs": [PARENT, {"name": "local"}]}})
    route = {"metadata": {"generation": 2}, "status": {"parents": parents}}
    observed = Observed(body=body, children={Ref("HTTPRoute", "m"): route}, missing=frozenset(missing))

    decided = routing.condition(spec.parse(body), observed)

    assert decided is not None and decided[:2] == expected and decided[2].isprintable()
