"""A plan writes what is missing, changed or lost, and nothing else; most plans are empty."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire_operator import names, resources, spec
from quire_operator.observed import Observed, Ref, ref
from quire_operator.plan import lost_fields, with_applied_hash
from quire_operator.settings import Settings
from tests.operator.plan.planning import plan_of

Body = dict[str, Any]

BODY: Body = {
    "apiVersion": names.API_VERSION,
    "kind": names.KIND,
    "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": 1},
    "spec": {
        "model": {"source": {"pvc": {"claimName": "models"}}},
        "resources": {"cpu": "1", "memory": "2Gi"},
        "scheduling": {"nodeSelector": {"disk": "fast"}},
    },
}
DESIRED = resources.build(spec.parse(BODY), Settings(engine_image="engine:1"))


def live(manifest: Body) -> Body:
    """As the API server gives it back: with_applied_hash, defaulted here and there, with its own
    bookkeeping.
    """
    body = copy.deepcopy(with_applied_hash(manifest))
    body["metadata"] |= {"uid": f"uid-{body['kind']}", "resourceVersion": "7", "managedFields": []}
    body["status"] = {"observedGeneration": 1}
    if body["kind"] == "Deployment":
        body["spec"]["revisionHistoryLimit"] = 10
        body["spec"]["template"]["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
        body["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    return body


def observed(*changes: Body, without: str = "", **fields: Any) -> Observed:
    children = {ref(m): live(m) for m in DESIRED if m["kind"] != without}
    children |= {ref(body): body for body in changes}
    return Observed(body=BODY, children=children, **fields)


def edited(kind: str, path: str, value: Any) -> Body:
    """A live child with one field changed by hand; None deletes the field."""
    body = live(next(m for m in DESIRED if m["kind"] == kind))
    *parents, last = path.split("/")
    place: Any = body
    for step in parents:
        place = place[int(step) if step.isdigit() else step]
    if value is None:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return body


def test_the_plan_is_empty_when_every_child_matches() -> None:
    plan = plan_of(DESIRED, observed())

    assert not plan
    assert plan.details == ()


def test_without_children_all_but_the_pod_disruption_budget_are_applied_in_build_order() -> None:
    plan = plan_of(DESIRED, Observed(body=BODY))

    before_pods = [m for m in DESIRED if m["kind"] != "PodDisruptionBudget"]
    assert [ref(m) for m in plan.apply] == [ref(m) for m in before_pods]
    assert plan.repairs == (), "a first apply repairs nothing"


def test_the_pod_disruption_budget_is_applied_with_the_first_pod_and_kept_without_pods() -> None:
    pod = {"metadata": {"name": "m-0", "uid": "p"}, "spec": {}}
    plan = plan_of(DESIRED, observed(without="PodDisruptionBudget", pods=(pod,)))

    assert [m["kind"] for m in plan.apply] == ["PodDisruptionBudget"]
    assert not plan_of(DESIRED, observed()), "scaled to zero"


@pytest.mark.parametrize("kind", [m["kind"] for m in DESIRED])
def test_a_missing_child_is_applied_alone(kind: str) -> None:
    pod = {"metadata": {"name": "m-0", "uid": "p"}, "spec": {}}
    plan = plan_of(DESIRED, observed(without=kind, pods=(pod,)))

    assert [m["kind"] for m in plan.apply] == [kind]


CONTAINER = "spec/template/spec/containers/0"
EDITS = [
    ("Deployment", "spec/replicas", 5),
    ("Deployment", f"{CONTAINER}/image", "evil:1"),
    ("Deployment", f"{CONTAINER}/args", ["serve"]),
    ("Deployment", f"{CONTAINER}/args/1", "/models/other"),
    ("Deployment", f"{CONTAINER}/envFrom/0/configMapRef/name", "m-other"),
    ("Deployment", f"{CONTAINER}/securityContext/capabilities/drop", []),
    ("Deployment", f"{CONTAINER}/securityContext/readOnlyRootFilesystem", False),
    ("Deployment", f"{CONTAINER}/readinessProbe", None),
    ("Deployment", f"{CONTAINER}/volumeMounts", []),
    ("Deployment", "spec/template/spec/nodeSelector", {"disk": "fast", "more": "added"}),
    ("Deployment", "spec/template/spec/automountServiceAccountToken", True),
    ("Service", "spec/selector", {names.LABEL_NAME: "m", names.LABEL_ROLE: "leader", "more": "added"}),
    ("Service", "spec/ports/0/targetPort", 9999),
    ("PodDisruptionBudget", "spec/maxUnavailable", 0),
    ("NetworkPolicy", "spec/ingress", []),
    ("NetworkPolicy", "spec/podSelector", {}),
    ("ServiceAccount", "automountServiceAccountToken", True),
    ("ConfigMap", "metadata/labels", {}),
    ("ConfigMap", "metadata/ownerReferences", None),
    ("ConfigMap", "metadata/annotations", {}),
]


@pytest.mark.parametrize(("kind", "path", "value"), EDITS)
def test_an_owned_field_that_was_edited_by_hand_is_applied_again(kind: str, path: str, value: Any) -> None:
    body = edited(kind, path, value)

    plan = plan_of(DESIRED, observed(body))

    assert [m["kind"] for m in plan.apply] == [kind]
    assert plan.repairs == (ref(body),)
    assert plan.details[0].startswith(f"apply {ref(body)}: lost ")


ADDITIONS = [
    ("Deployment", "metadata/labels/team", "a"),
    ("Deployment", "metadata/annotations/revision", "3"),
    ("Deployment", "spec/minReadySeconds", 5),
    ("Service", "spec/clusterIP", "10.0.0.7"),
]


@pytest.mark.parametrize(("kind", "path", "value"), ADDITIONS)
def test_fields_added_by_other_managers_are_left_alone(kind: str, path: str, value: Any) -> None:
    body = edited(kind, path, value)

    assert not plan_of(DESIRED, observed(body))


def test_containers_and_variables_injected_by_other_managers_are_left_alone() -> None:
    body = edited("Deployment", "spec/minReadySeconds", 0)
    pod = body["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "sidecar", "image": "proxy:1"})
    pod["containers"][1]["env"] = [{"name": "INJECTED", "value": "1"}]

    assert not plan_of(DESIRED, observed(body))


def test_a_changed_manifest_is_applied_and_not_counted_as_a_repair() -> None:
    newer = resources.build(spec.parse(BODY), Settings(engine_image="engine:2"))

    plan = plan_of(newer, observed())

    assert [m["kind"] for m in plan.apply] == ["Deployment"]
    assert plan.repairs == ()


def test_a_foreign_object_is_left_alone() -> None:
    plan = plan_of(DESIRED, observed(without="Service", foreign=(Ref("Service", "m"),)))

    assert not plan


def test_nothing_is_planned_for_a_terminating_child() -> None:
    body = edited("Service", "metadata/deletionTimestamp", "2026-01-01T00:00:00Z")
    body["spec"]["selector"] = {}

    assert not plan_of(DESIRED, observed(body))


def test_an_unwanted_child_is_deleted_by_its_uid() -> None:
    wanted = [m for m in DESIRED if m["kind"] != "NetworkPolicy"]

    plan = plan_of(wanted, observed())

    assert plan.delete == ((Ref("NetworkPolicy", "m"), "uid-NetworkPolicy"),)


def old_config_map() -> Body:
    body = live(next(m for m in DESIRED if m["kind"] == "ConfigMap"))
    body["metadata"] |= {"name": "m-0000000000", "uid": "uid-old"}
    return body


def refers_to(name: str) -> Body:
    return {"containers": [{"name": "server", "envFrom": [{"configMapRef": {"name": name}}]}]}


def test_an_old_config_map_is_deleted_once_nothing_refers_to_it() -> None:
    assert plan_of(DESIRED, observed(old_config_map())).delete == (
        (Ref("ConfigMap", "m-0000000000"), "uid-old"),
    )


def test_an_old_config_map_stays_for_a_replica_set_or_a_pod_that_refers_to_it() -> None:
    metadata = {"name": "x", "uid": "x"}
    replica_set = {"metadata": metadata, "spec": {"template": {"spec": refers_to("m-0000000000")}}}
    pod = {"metadata": metadata, "spec": refers_to("m-0000000000")}

    assert not plan_of(DESIRED, observed(old_config_map(), replica_sets=(replica_set,)))
    assert not plan_of(DESIRED, observed(old_config_map(), pods=(pod,)))


def pod(*, ready: bool, **annotations: str) -> Body:
    return {
        "metadata": {"name": "m-0", "uid": "p1", "annotations": dict(annotations)},
        "spec": refers_to("m-x"),
        "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def test_eviction_protection_annotations_are_removed_from_a_pod_once_it_is_ready() -> None:
    protected = names.PROTECT_WHILE_LOADING

    assert not plan_of(DESIRED, observed(pods=(pod(ready=False, **protected),)))
    (release,) = plan_of(DESIRED, observed(pods=(pod(ready=True, **protected),))).pod_patches
    assert (release.name, release.annotations) == ("m-0", dict.fromkeys(protected))


def test_protection_annotations_with_other_values_than_ours_are_left_alone() -> None:
    theirs = dict.fromkeys(names.PROTECT_WHILE_LOADING, "something-else")

    assert not plan_of(DESIRED, observed(pods=(pod(ready=True, **theirs),)))


def test_true_and_one_are_different_values() -> None:
    assert lost_fields({"a": True}, {"a": 1}) == ["a"]
    assert lost_fields({"a": 1}, {"a": 1, "b": 2}) == []
