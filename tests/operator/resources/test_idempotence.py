"""Rendering is a function of the spec alone, and a rendered child needs no second write."""

from __future__ import annotations

import json

from hypothesis import given, settings

from e2e.api import specs
from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref, ref
from quire_operator.settings import Settings
from tests.examples import examples
from tests.operator.plan.planning import plan_of

SETTINGS = Settings(
    engine_image="registry.example/quire-server:1", allow_faults=True, credential_hosts=("*.example.com",)
)
UID = "11111111-2222-3333-4444-555555555555"


@settings(max_examples=examples(60), derandomize=True)
@given(specs.random_bodies())
def test_equal_specs_render_equal_children_in_any_field_order(body: specs.Body) -> None:
    turned = json.loads(json.dumps(body, sort_keys=True))
    first, second = (resources.build(spec.parse(each), SETTINGS) for each in (body, turned))
    assert first == second


@settings(max_examples=examples(60), derandomize=True)
@given(specs.random_bodies())
def test_applied_children_need_no_second_apply(body: specs.Body) -> None:
    owned = specs.merged(body, {"metadata": {"uid": UID}})
    children = resources.build(spec.parse(owned), SETTINGS)
    pod = {"metadata": {"name": "a-0", "uid": "p"}, "spec": {}}  # its budget waits for one
    early = Ref("PodDisruptionBudget", names.workload(owned["metadata"]["name"], names.ROLE_PREFILL))
    first = plan_of(children, Observed(body=owned, pods=(pod,)))
    waits = owned["spec"].get("cache", {}).get("mode") == "SharedPVC"  # for its Job
    wanted = [ref(child) for child in children if ref(child) != early]
    assert waits or [ref(child) for child in first.apply] == wanted

    stored = {"uid": "c", "resourceVersion": "1"}
    live = {ref(child): {**child, "metadata": {**child["metadata"], **stored}} for child in first.apply}
    assert not plan_of(children, Observed(body=owned, children=live, pods=(pod,)))
