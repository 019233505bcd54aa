"""Two roles in one plan: each has a rollout, a number of pods and an eviction budget of its own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.api import specs
from e2e.operator import pods as kubelet
from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref, ref
from quire_operator.plan import disruption_budget, strategy, with_applied_hash
from quire_operator.resources import RenderedRevision, parse_stored, with_revision
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import deployment, pod

Body = dict[str, Any]

OLD, NEW = Settings(engine_image="engine:1"), Settings(engine_image="engine:2")


def body(disaggregation: Body | None, **fields: Any) -> Body:
    roles = {} if disaggregation is None else {"disaggregation": disaggregation}
    return specs.merged(
        specs.minimal(**roles, **fields), {"metadata": {"name": "m", "namespace": "ns", "uid": "u1"}}
    )


ROLES: Body = {"prefill": {}}
PREFILL = Ref("Deployment", "m-prefill")


def live_deployment(name: str, **fields: Any) -> Body:
    made = deployment(**fields)
    return {**made, "metadata": {**made["metadata"], "name": name, "uid": f"uid-{name}"}}


def replica_set(uid: str, of: str, revision: int) -> Body:
    return {
        "kind": "ReplicaSet",
        "metadata": {
            "name": uid,
            "uid": uid,
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
            "ownerReferences": [{"controller": True, "uid": f"uid-{of}"}],
        },
        "spec": {"template": {"spec": {}}},
    }


def observed(*pods: Body, asked: Body | None = None, **children: Body) -> Observed:
    """Both Deployments, `decode` with revisions 1 and 2, `prefill` with revision 7."""
    both = {"m": live_deployment("m"), "m-prefill": live_deployment("m-prefill")} | {
        {"decode": "m", "prefill": "m-prefill"}[role]: live for role, live in children.items()
    }
    return Observed(
        body=asked or body(ROLES),
        children={Ref("Deployment", name): live for name, live in both.items()},
        replica_sets=(
            replica_set("d1", "m", 1),
            replica_set("d2", "m", 2),
            replica_set("p7", "m-prefill", 7),
        ),
        pods=pods,
    )


def stored(asked: Body) -> dict[Ref, Body]:
    made = [with_applied_hash(child) for child in resources.build(spec.parse(asked), OLD)]
    uids = {ref(one): {"uid": f"uid-{one['kind']}-{one['metadata']['name']}"} for one in made}
    return {ref(one): {**one, "metadata": {**one["metadata"], **uids[ref(one)]}} for one in made}


def test_pods_are_of_the_role_of_their_deployment() -> None:
    seen = observed(pod({}, name="a", of="d2"), pod({}, name="b", of="p7"), pod({}, name="c", of="d1"))
    for role, expected in ((names.ROLE_LEADER, ["a", "c"]), (names.ROLE_PREFILL, ["b"])):
        assert [one["metadata"]["name"] for one in seen.in_role(role).pods] == expected


def test_when_the_field_is_removed_everything_of_the_prefill_pods_is_deleted_and_nothing_else() -> None:
    asked = body({"prefill": {"autoscaling": {"maxReplicas": 2}}})
    before = stored(asked)
    desired = resources.build(spec.parse(body(None)), OLD)
    plan = plan_of(desired, Observed(body=body(None), children=before))

    deleted = {target for target, _ in (*plan.delete_first, *plan.delete)}
    of_prefill = {target for target in before if target.name == "m-prefill"}
    assert len(of_prefill) == 5
    environments = {target for target in deleted if target.kind == "ConfigMap"}
    assert deleted - environments == of_prefill
    assert {ref(child) for child in desired} & deleted == set()


def test_the_environment_of_prefill_pods_is_kept_while_a_pod_uses_it() -> None:
    before = stored(body(ROLES))
    template = before[PREFILL]["spec"]["template"]["spec"]
    (source,) = template["containers"][0]["envFrom"]
    name = source["configMapRef"]["name"]
    going = {"metadata": {"name": "b", "uid": "b"}, "spec": template, "status": {}}
    desired = resources.build(spec.parse(body(None)), OLD)
    plan = plan_of(desired, Observed(body=body(None), children=before, pods=(going,)))

    assert Ref("ConfigMap", name) not in {target for target, _ in plan.delete}


def test_a_role_whose_surge_pod_finds_no_room_goes_in_place_and_the_other_goes_on() -> None:
    waits = kubelet.unschedulable("0/1 nodes are available: 1 Insufficient cpu. No preemption victims found")
    for condition in waits["conditions"]:
        condition["lastTransitionTime"] = kubelet.at(-100)
    asked = body(ROLES, rollout={"surgeWaitSeconds": 60})
    live = live_deployment("m", replicas=2, updated=1, ready=1)
    seen = observed(pod({}, name="a", of="d1"), pod(waits, name="b", of="d2"), asked=asked, decode=live)
    desired = resources.build(spec.parse(asked), NEW)
    for role in spec.parse(asked).roles:
        desired = strategy.with_effective_strategy(desired, role, seen.in_role(role.role), datetime.now(UTC))

    surge = {
        child["metadata"]["name"]: child["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
        for child in desired
        if child["kind"] == "Deployment"
    }
    assert surge == {"m": 0, "m-prefill": 1}


def test_a_prefill_pod_without_a_place_does_not_widen_the_budget_of_decode_pods() -> None:
    waits = kubelet.unschedulable("0/1 nodes are available: 1 Insufficient cpu.")
    for condition in waits["conditions"]:
        condition["lastTransitionTime"] = kubelet.at(-100)
    seen = observed(pod({}, name="a", of="d2"), pod(waits, name="b", of="p7"))
    desired = resources.build(spec.parse(body(ROLES)), OLD)
    for role in spec.parse(body(ROLES)).roles:
        desired = disruption_budget.with_replicas_that_serve(
            desired, role, seen.in_role(role.role), datetime.now(UTC)
        )

    most = {
        child["metadata"]["name"]: child["spec"]["maxUnavailable"]
        for child in desired
        if child["kind"] == "PodDisruptionBudget"
    }
    assert most == {"m": 1, "m-prefill": 2}


def test_a_budget_is_applied_with_the_first_pod_of_its_role() -> None:
    desired = resources.build(spec.parse(body(ROLES)), OLD)

    def budgets(*pods: Body) -> set[str]:
        plan = plan_of(desired, observed(*pods))
        return {one["metadata"]["name"] for one in plan.apply if one["kind"] == "PodDisruptionBudget"}

    assert budgets() == set()
    assert budgets(pod({}, name="a", of="d2")) == {"m"}
    assert budgets(pod({}, name="a", of="d2"), pod({}, name="b", of="p7")) == {"m", "m-prefill"}


def test_the_number_of_prefill_pods_is_left_to_their_autoscaler_and_that_of_decode_pods_to_the_spec() -> None:
    asked = body({"prefill": {"autoscaling": {"maxReplicas": 4}}}, replicas=2)
    claim = {"manager": "hpa", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    scaled = live_deployment("m-prefill")
    scaled["metadata"] |= {"managedFields": [claim], "resourceVersion": "3"}
    scaled["spec"]["replicas"] = 3
    plan = plan_of(resources.build(spec.parse(asked), OLD), observed(asked=asked, prefill=scaled))

    numbers = {
        one["metadata"]["name"]: one["spec"].get("replicas")
        for one in plan.apply
        if one["kind"] == "Deployment"
    }
    assert numbers == {"m": 2, "m-prefill": None}


def test_a_model_that_is_not_downloaded_yet_holds_back_both_deployments() -> None:
    downloaded = specs.DOWNLOADED[4]["spec"]
    assert downloaded["cache"]["mode"] == "SharedPVC"
    source = {"model": downloaded["model"], "cache": downloaded["cache"]}
    asked = specs.merged(body(ROLES), {"spec": source})
    asked["spec"]["model"]["source"].pop("pvc", None)
    asked["spec"]["cache"].pop("accessMode", None)
    desired = resources.build(spec.parse(asked), Settings(engine_image="e:1", credential_hosts=("*",)))
    plan = plan_of(desired, Observed(body=asked))

    kinds = {str(ref(one)) for one in plan.apply}
    assert any(kind.startswith("Job ") for kind in kinds)
    assert not {"Deployment m", "Deployment m-prefill"} & kinds


def revision_of(asked: Body, settings: Settings = OLD) -> RenderedRevision:
    model = spec.parse(asked)
    return resources.render_revision(model, asked["spec"], resources.build(model, settings))


def test_a_stored_revision_keeps_the_pods_of_both_roles_and_leaves_their_numbers() -> None:
    asked = body({"prefill": {"replicas": 2}}, replicas=3)
    first = revision_of(body(ROLES))
    children = {ref(one): one for one in with_revision(resources.build(spec.parse(asked), NEW), first)}

    for name, replicas in (("m", 3), ("m-prefill", 2)):
        made = children[Ref("Deployment", name)]
        assert made["spec"]["replicas"] == replicas
        assert made["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:1"
        assert made["metadata"]["annotations"] == {names.ANNOTATION_RENDER_REVISION: first.name}
    assert children.keys() == {ref(one) for one in resources.build(spec.parse(asked), OLD)}


@pytest.mark.parametrize(
    "change",
    [
        {"disaggregation": {"prefill": {"replicas": 5}}},
        {"disaggregation": {"prefill": {"autoscaling": {"maxReplicas": 5}}}},
        {"disaggregation": {"decode": {"replicas": 5}}},
    ],
)
def test_the_numbers_of_both_roles_create_no_new_revision(change: Body) -> None:
    changed = specs.merged(body(ROLES), {"spec": change})
    first = revision_of(body(ROLES))
    assert resources.renders_same_pods(spec.parse(changed), changed, first)
    assert revision_of(changed).name == first.name


@pytest.mark.parametrize(
    "change",
    [
        {"disaggregation": None},
        {"disaggregation": {"leaseSeconds": 5}},
        {"disaggregation": {"transport": "TCP"}},
        {"disaggregation": {"prefill": {"resources": {"cpu": "3", "memory": "1Gi"}}}},
        {"disaggregation": {"decode": {"resources": {"cpu": "3", "memory": "1Gi"}}}},
    ],
)
def test_what_changes_the_pods_of_a_role_creates_a_new_revision(change: Body) -> None:
    changed = specs.merged(body(ROLES), {"spec": change})
    first = revision_of(body(ROLES))
    assert not resources.renders_same_pods(spec.parse(changed), changed, first)
    assert revision_of(changed).name != first.name


def test_a_rollback_to_before_the_roles_leaves_out_all_of_the_prefill_pods() -> None:
    asked = body({"prefill": {"autoscaling": {"maxReplicas": 4}}})
    children = with_revision(resources.build(spec.parse(asked), NEW), revision_of(body(None)))

    assert {ref(one) for one in children} == {
        ref(one) for one in resources.build(spec.parse(body(None)), OLD)
    }


def test_a_rollback_to_the_roles_starts_one_prefill_pod() -> None:
    children = with_revision(resources.build(spec.parse(body(None)), NEW), revision_of(body(ROLES)))

    (prefill,) = [one for one in children if ref(one) == PREFILL]
    assert prefill["spec"]["replicas"] == 1
    assert {ref(one) for one in children} == {
        ref(one) for one in resources.build(spec.parse(body(ROLES)), OLD)
    }


def test_a_revision_of_both_roles_is_read_back_and_one_without_decode_pods_is_refused() -> None:
    asked = body(ROLES)
    model, revision = spec.parse(asked), revision_of(asked)
    assert parse_stored(model, revision.name, revision.data) == revision

    others = [one for one in revision.children if ref(one) != Ref("Deployment", "m")]
    for children in (others, [*revision.children, revision.children[-1]]):
        forged = resources.render_revision(model, asked["spec"], children)
        assert parse_stored(model, forged.name, forged.data) is None


def test_the_number_of_groups_is_left_to_their_autoscaler() -> None:
    asked = specs.merged(body(None), {"spec": specs.GROUPED["spec"]})
    asked["spec"].pop("replicas", None)
    asked["spec"]["autoscaling"] = {"maxReplicas": 4}
    desired = resources.build(spec.parse(asked), OLD)
    (made,) = [one for one in desired if one["kind"] == names.GROUP_KIND]
    claim = {"manager": "hpa", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    live = {**made, "metadata": {**made["metadata"], "managedFields": [claim], "resourceVersion": "3"}}
    live["metadata"] |= {"uid": "g"}
    live["spec"] = {**made["spec"], "replicas": 3}
    plan = plan_of(desired, Observed(body=asked, children={ref(made): live}))

    (applied,) = [one for one in plan.apply if one["kind"] == names.GROUP_KIND]
    assert "replicas" not in applied["spec"]
