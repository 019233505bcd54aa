"""The number of replicas is left to an autoscaler only once it owns the field; before that the live one is
kept.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref, ref
from quire_operator.plan import ReplicaOwner, find_replica_owner, with_applied_hash
from quire_operator.plan.replica_owner import replicas_to_apply
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of
from tests.operator.status.objects import model_body

Body = dict[str, Any]

OURS = {"manager": "quire-operator", "operation": "Apply"}
HPA = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale"}
KUBECTL = {"manager": "kubectl", "operation": "Update", "subresource": "scale"}
NAMESAKE = {"manager": "quire-operator", "operation": "Update"}
OWNS = {"fieldsV1": {"f:spec": {"f:replicas": {}, "f:paused": {}}}}
OWNS_OTHER = {"fieldsV1": {"f:spec": {"f:template": {}}}}
SETTINGS = Settings(engine_image="engine:1")
SCALED = {"autoscaling": {"minReplicas": 2, "maxReplicas": 8}}


def live(count: int | None, *owners: Body, owns: Body = OWNS) -> Body:
    return {
        "kind": "Deployment",
        "metadata": {
            "name": "m",
            "uid": "d1",
            "resourceVersion": "7",
            "managedFields": [{**owner, **owns} for owner in owners],
        },
        "spec": {} if count is None else {"replicas": count},
    }


SPEC, OWN, OTHERS, RIVAL = ReplicaOwner.SPEC, ReplicaOwner.HPA, ReplicaOwner.EXTERNAL, ReplicaOwner.UNDECLARED


@pytest.mark.parametrize(
    ("wanted", "by", "deployment", "applied"),
    [
        # The spec gives the number: whatever anyone did to it.
        (3, SPEC, None, 3),
        (3, SPEC, live(5, OURS), 3),
        (3, SPEC, live(5, KUBECTL), 3),
        (0, SPEC, live(6, HPA), 0),
        # A new Deployment begins with the least.
        (2, OWN, None, 2),
        (2, OTHERS, None, 2),
        # No one else owns the number yet: keep what there is.
        (2, OWN, live(6, OURS), 6),
        (2, OTHERS, live(6, OURS), 6),
        (2, OWN, live(6), 6),
        (2, OWN, live(None), 2),
        (2, OWN, live(6, HPA, owns=OWNS_OTHER), 6),
        (3, OWN, live(1, OURS), 3),
        # another owner owns it: it stays when it is left out.
        (2, OWN, live(6, HPA), None),
        (2, OWN, live(6, OURS, HPA), None),
        (2, OWN, live(6, KUBECTL), None),
        (2, OWN, live(6, NAMESAKE), None),
        (2, OTHERS, live(6, HPA), None),
        (2, OTHERS, live(1, KUBECTL), None),
        # 0 switches a HorizontalPodAutoscaler off: after a suspension, or when another client scaled to it.
        (2, OWN, live(0, OURS), 2),
        (2, OWN, live(0, KUBECTL), 2),
        (2, OTHERS, live(0, OURS), 2),
        (2, OTHERS, live(0, HPA), None),
        # A 0 that came through /scale has no owner.
        (2, OTHERS, live(0), None),
        (3, RIVAL, live(0), None),
        (2, OWN, live(0), 2),
        # An autoscaler of which the spec says nothing is reported and not fought.
        (3, RIVAL, live(5, HPA), None),
        (3, RIVAL, live(5, OURS), 3),
    ],
)
def test_replicas_are_applied_until_another_field_manager_owns_them(
    wanted: int, by: ReplicaOwner, deployment: Body | None, applied: int | None
) -> None:
    assert replicas_to_apply(wanted, by, deployment) == applied


def rival(kind: str = "Deployment") -> Body:
    return {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "theirs", "uid": "h9"},
        "spec": {"scaleTargetRef": {"kind": kind, "name": "m"}},
    }


@pytest.mark.parametrize(
    ("fields", "foreign_autoscalers", "who"),
    [
        ({}, (), SPEC),
        ({"replicas": 3}, (), SPEC),
        ({"replicas": 3}, (rival(),), RIVAL),
        ({"replicas": 0}, (rival(),), SPEC),
        (SCALED, (), OWN),
        (SCALED, (rival(),), OWN),
        ({**SCALED, "suspend": True}, (rival(),), SPEC),
        ({"autoscaling": {"maxReplicas": 4, "backend": "External"}}, (rival(),), OTHERS),
        ({"autoscaling": {"maxReplicas": 4, "backend": "KEDA"}}, (), OTHERS),
    ],
)
def test_the_replica_owner_follows_from_the_spec_and_the_installed_autoscalers(
    fields: Body, foreign_autoscalers: tuple[Body, ...], who: ReplicaOwner
) -> None:
    body = model_body(**fields)
    assert (
        find_replica_owner(spec.parse(body), Observed(body=body, foreign_autoscalers=foreign_autoscalers))
        is who
    )


def planned(fields: Body, deployment: Body | None, *, hpa: bool = False) -> tuple[Any, Body | None]:
    """The plan for these fields, and the Deployment in it."""
    body = model_body(**fields)
    model = spec.parse(body)
    desired = resources.build(model, SETTINGS)
    children = {
        ref(m): {**with_applied_hash(m), "metadata": {**with_applied_hash(m)["metadata"], "uid": "x"}}
        for m in desired
    }
    if deployment is None:
        del children[Ref("Deployment", "m")]
    else:
        children[Ref("Deployment", "m")] = deployment
    if hpa:
        children[Ref("HorizontalPodAutoscaler", "m")] = {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "m", "uid": "h1"},
        }
    observed = Observed(body=body, children=children)
    plan = plan_of(desired, observed)
    return plan, next((dict(m) for m in plan.apply if m["kind"] == "Deployment"), None)


def applied(fields: Body, count: int, *owners: Body) -> Body:
    """The Deployment as it lives after our apply, with another number of another owner."""
    _, manifest = planned(fields, None)
    assert manifest is not None
    return {
        **manifest,
        "metadata": {**manifest["metadata"], **live(count, *owners)["metadata"]},
        "spec": {**manifest["spec"], "replicas": count},
    }


def test_a_new_autoscaled_deployment_is_created_with_min_replicas_and_no_resource_version() -> None:
    _, manifest = planned(SCALED, None)

    assert manifest is not None
    assert manifest["spec"]["replicas"] == 2
    assert "resourceVersion" not in manifest["metadata"]


@pytest.mark.parametrize("count", [2, 5, 8])
def test_replicas_set_by_an_autoscaler_are_never_overwritten(count: int) -> None:
    assert not planned(SCALED, applied(SCALED, count, HPA))[0]
    assert not planned(SCALED, applied(SCALED, count, OURS))[0]


def test_a_template_change_applies_live_replicas_at_their_resource_version_unless_the_hpa_owns_them() -> None:
    newer = {**SCALED, "engine": {"maxModelLen": 1024}}
    _, before = planned(newer, applied(SCALED, 6, OURS))
    _, after = planned(newer, applied(SCALED, 6, HPA))

    assert before is not None and after is not None
    assert (before["spec"]["replicas"], before["metadata"]["resourceVersion"]) == (6, "7")
    assert "replicas" not in after["spec"] and "resourceVersion" not in after["metadata"]
    key = names.ANNOTATION_APPLIED_HASH
    assert before["metadata"]["annotations"][key] == after["metadata"]["annotations"][key]


def test_switching_to_an_autoscaler_keeps_the_replicas_until_it_owns_them() -> None:
    plan, manifest = planned(SCALED, applied({"replicas": 6}, 6, OURS))

    assert manifest is not None and manifest["spec"]["replicas"] == 6
    assert plan.repairs == ()
    assert not planned(SCALED, {**applied(SCALED, 6, HPA)})[0], "and taking it costs no write"


def test_switching_to_fixed_replicas_deletes_the_autoscaler_first() -> None:
    plan, manifest = planned({"replicas": 6}, applied(SCALED, 6, HPA), hpa=True)

    assert plan.delete_first == ((Ref("HorizontalPodAutoscaler", "m"), "h1"),)
    assert plan.delete == ()
    assert manifest is not None and manifest["spec"]["replicas"] == 6
    assert "resourceVersion" not in manifest["metadata"], "the spec's number needs no reading"


@pytest.mark.parametrize(
    "fields", [{**SCALED, "suspend": True}, {"autoscaling": {"maxReplicas": 4, "backend": "External"}}]
)
def test_suspension_and_backend_external_delete_our_autoscaler_first(fields: Body) -> None:
    assert planned(fields, applied(SCALED, 6, HPA), hpa=True)[0].delete_first


def test_resuming_from_suspension_restores_min_replicas() -> None:
    suspended = applied({**SCALED, "suspend": True}, 0, OURS)
    _, manifest = planned(SCALED, suspended)

    assert manifest is not None and manifest["spec"]["replicas"] == 2


def test_the_spec_owns_the_replicas_only_after_kedas_autoscaler_is_gone() -> None:
    body = model_body(replicas=3)
    made: Body = {"metadata": {"name": "keda-hpa-m"}}

    assert find_replica_owner(spec.parse(body), Observed(body=body, keda_autoscaler=made)) is RIVAL
    assert find_replica_owner(spec.parse(body), Observed(body=body)) is SPEC
