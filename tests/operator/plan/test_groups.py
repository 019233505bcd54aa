"""What is planned for groups of pods: a start delay where they crash, and a new set for another size."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref
from quire_operator.plan import Plan, drift
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import Body, model_body

SETTINGS = Settings(engine_image="registry.example/quire-server:1")


def body(nodes: int = 2, *, delay: int = 0, **fields: Any) -> Body:
    made = model_body(parallelism={"tensor": 4, "nodes": nodes}, **fields)
    made["spec"]["resources"]["cpu"] = "4"
    entry = {"index": 0, "startDelaySeconds": delay}
    return {**made, "status": {"groups": [entry]} if delay else {}}


def desired(of: Body) -> tuple[Body, ...]:
    return resources.build(spec.parse(of), SETTINGS)


def stored(manifest: Body) -> Body:
    """As the API server has it after the operator's apply."""
    live = copy.deepcopy(drift.with_applied_hash(manifest))
    live["metadata"] |= {"uid": "g1", "resourceVersion": "5"}
    return live


def planned(of: Body, live_for: Body | None = None) -> Plan:
    children = {
        Ref(child["kind"], child["metadata"]["name"]): stored(child)
        for child in (desired(live_for) if live_for is not None else ())
    }
    return plan_of(desired(of), Observed(body=of, children=children))


def applied(plan: Plan) -> list[str]:
    return [f"{one['kind']} {one['metadata']['name']}" for one in plan.apply]


def test_several_nodes_are_a_leader_worker_set_and_no_deployment() -> None:
    kinds = {child["kind"] for child in desired(body())}
    assert names.GROUP_KIND in kinds and "Deployment" not in kinds
    assert "Deployment" in {child["kind"] for child in desired(body(nodes=1))}


def test_groups_that_crash_over_and_over_read_their_delay_from_a_config_map() -> None:
    plan = planned(body(delay=40))
    (found,) = [one for one in plan.apply if one["metadata"]["name"] == "m-start-delay"]
    assert found["data"] == {"seconds": "40"}


def test_a_delay_changes_no_pod_template() -> None:
    assert [one for one in desired(body(delay=40)) if one["kind"] == names.GROUP_KIND] == [
        one for one in desired(body()) if one["kind"] == names.GROUP_KIND
    ]


def test_the_config_map_goes_with_the_delay() -> None:
    of = body()
    live = {
        "kind": "ConfigMap",
        "metadata": {"name": "m-start-delay", "uid": "c1", "ownerReferences": []},
        "data": {"seconds": "10"},
    }
    observed = Observed(body=of, children={Ref("ConfigMap", "m-start-delay"): live})
    assert (Ref("ConfigMap", "m-start-delay"), "c1") in plan_of(desired(of), observed).delete


def test_groups_of_another_size_get_a_new_set() -> None:
    plan = planned(body(nodes=4), live_for=body(nodes=2))
    assert (Ref(names.GROUP_KIND, "m"), "g1") in plan.delete
    assert f"{names.GROUP_KIND} m" not in applied(plan)


def test_groups_of_the_same_size_keep_their_set() -> None:
    plan = planned(body(), live_for=body())
    assert not [target for target, _ in plan.delete if target.kind == names.GROUP_KIND]


@pytest.mark.parametrize(("paused", "partition"), [(False, 0), (True, 1000)])
def test_a_paused_rollout_updates_no_group(paused: bool, partition: int) -> None:
    (found,) = [
        child for child in desired(body(rollout={"paused": paused})) if child["kind"] == names.GROUP_KIND
    ]
    assert found["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"] == partition


def test_workers_get_no_requests_and_wait_for_none() -> None:
    children = {child["kind"]: child for child in desired(body())}
    worker = children[names.GROUP_KIND]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    selector = children["Service"]["spec"]["selector"]
    assert not selector.items() <= worker["metadata"]["labels"].items()
    (container,) = worker["spec"]["containers"]
    assert "lifecycle" not in container
    assert "http" not in {port["name"] for port in container["ports"]}
