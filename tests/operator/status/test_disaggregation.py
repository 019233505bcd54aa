"""The status of an LLMDeployment with prefill pods: numbers of both roles, and whether transfers work."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Sample
from quire_operator.status import transitions
from tests.operator.status.objects import condition, deployment, model_body, pod, replica_set

Body = dict[str, Any]

DECODE = pod(kubelet.ready(), name="decode", of="d1")
PREFILL = pod(kubelet.ready(), name="prefill", of="p1")
READY = deployment(ready=1)
UNREADY = deployment(ready=0)


def compute(
    *pods: Body,
    decode: Body = READY,
    prefill: Body | None = READY,
    degraded: tuple[str, ...] = (),
    old: Body | None = None,
    **fields: Any,
) -> Body:
    """`degraded`: pods that report it."""
    body = model_body(**{"disaggregation": {"prefill": {}}, **fields})
    children = {Ref("Deployment", "m"): decode}
    if prefill is not None:
        about = {**prefill["metadata"], "name": "m-prefill", "uid": "d2"}
        children[Ref("Deployment", "m-prefill")] = {**prefill, "metadata": about}
    sets = []
    for uid, owner in (("d1", "d1"), ("p1", "d2")):
        made = replica_set(uid, 1)
        made["metadata"]["ownerReferences"] = [{"controller": True, "uid": owner}]
        sets.append(made)
    uids = [str(one["metadata"]["uid"]) for one in pods]
    observed = Observed(
        body={**body, "status": old or {}},
        children=children,
        replica_sets=tuple(sets),
        pods=pods,
        samples={
            uid: Sample(phase="serving", transfer_degraded=uid.removeprefix("uid-") in degraded)
            for uid in uids
        },
    )
    return status.compute_status(spec.parse(body), observed, now=datetime.now(UTC))


def message(computed: Body, kind: str) -> str:
    (found,) = [c["message"] for c in computed["conditions"] if c["type"] == kind]
    return str(found)


def test_both_roles_have_their_numbers_and_all_others_are_about_decode_pods() -> None:
    computed = compute(
        DECODE, PREFILL, prefill=UNREADY, disaggregation={"prefill": {"replicas": 2}}, replicas=1
    )

    assert computed["roles"] == [
        {"name": "decode", "desiredReplicas": 1, "readyReplicas": 1, "updatedReplicas": 1},
        {"name": "prefill", "desiredReplicas": 2, "readyReplicas": 0, "updatedReplicas": 1},
    ]
    assert (computed["desiredReplicas"], computed["readyReplicas"], computed["replicas"]) == (1, 1, 1)
    assert computed["selector"] == names.selector("m")


@pytest.mark.parametrize(
    ("fields", "expected", "said"),
    [
        ({"parallelism": {"authSecretRef": {"name": "ours"}}}, ("True", "KeyOfSecret"), "Secret ours"),
        ({"security": {"apiKeysSecretRef": {"name": "keys"}}}, ("True", "KeyOfAPIKeys"), "Secret keys"),
        ({}, ("False", "TransfersUnauthenticated"), "NetworkPolicy alone"),
        (
            {"networking": {"networkPolicy": {"mode": "None"}}},
            ("False", "TransfersUnauthenticated"),
            "no NetworkPolicy either",
        ),
        (
            {
                "disaggregation": {"prefill": {}, "transport": "NIXL"},
                "security": {"apiKeysSecretRef": {"name": "keys"}},
            },
            ("True", "KeyOfAPIKeys"),
            "NIXL has no authentication",
        ),
    ],
)
def test_the_status_says_by_what_pods_of_both_roles_know_each_other(
    fields: Body, expected: tuple[str, str], said: str
) -> None:
    computed = compute(DECODE, PREFILL, **fields)

    assert condition(computed, "TransfersAuthenticated") == expected
    assert said in message(computed, "TransfersAuthenticated")
    assert condition(computed, "Ready")[0] == "True", "it is a warning"
    reported = [event.reason for event in transitions.events({}, computed)]
    assert ("TransfersUnauthenticated" in reported) is (expected[0] == "False")


def test_pods_of_one_role_transfer_nothing() -> None:
    computed = compute(DECODE, prefill=None, disaggregation=None)
    assert "TransfersAuthenticated" not in [c["type"] for c in computed["conditions"]]


def test_without_prefill_pods_of_their_own_no_role_is_shown() -> None:
    computed = compute(DECODE, prefill=None, disaggregation=None)

    assert "roles" not in computed
    assert "TransferDegraded" not in [c["type"] for c in computed["conditions"]]


def test_transfers_are_as_expected_while_prefill_pods_are_ready_and_no_decode_pod_says_otherwise() -> None:
    computed = compute(DECODE, PREFILL)

    assert condition(computed, "TransferDegraded") == ("False", "AsExpected")
    assert condition(computed, "Ready") == ("True", "AllReplicasReady")
    assert condition(computed, "RolloutComplete") == ("True", "Complete")
    assert computed["phase"] == "Serving"


def test_without_a_ready_prefill_pod_the_endpoint_is_ready_and_transfers_are_degraded() -> None:
    computed = compute(DECODE, prefill=UNREADY)

    assert condition(computed, "TransferDegraded") == ("True", "TransferDegraded")
    assert "no prefill pod is ready" in message(computed, "TransferDegraded")
    assert condition(computed, "Ready") == ("True", "AllReplicasReady")
    assert condition(computed, "Available")[0] == "True"


def test_a_decode_pod_that_computed_its_last_prompt_itself_is_named() -> None:
    other = pod(kubelet.ready(), name="fine", of="d1")
    computed = compute(DECODE, other, PREFILL, degraded=("decode",), replicas=2)

    assert condition(computed, "TransferDegraded") == ("True", "TransferDegraded")
    assert "1 of 2 decode pods, such as decode" in message(computed, "TransferDegraded")


def test_what_a_prefill_pod_says_of_transfers_counts_for_nothing() -> None:
    assert condition(compute(DECODE, PREFILL, degraded=("prefill",)), "TransferDegraded")[0] == "False"


def test_before_the_first_decode_pod_is_ready_nothing_is_degraded() -> None:
    computed = compute(
        pod(kubelet.loading(), name="decode", of="d1"), PREFILL, decode=UNREADY, prefill=UNREADY
    )
    assert condition(computed, "TransferDegraded") == ("Unknown", "NoReadyReplica")


def test_a_suspended_llmdeployment_has_no_word_on_transfers() -> None:
    computed = compute(suspend=True, decode=UNREADY, prefill=UNREADY)
    assert "TransferDegraded" not in [c["type"] for c in computed["conditions"]]
    assert computed["phase"] == "Suspended"


def test_that_transfers_are_degraded_is_one_event() -> None:
    fine, degraded = compute(DECODE, PREFILL), compute(DECODE, prefill=UNREADY)

    assert [event.reason for event in transitions.events(fine, degraded)] == ["TransferDegraded"]
    assert transitions.events(degraded, degraded) == ()


def test_a_failing_prefill_pod_degrades_and_neither_stalls_nor_unreadies_the_endpoint() -> None:
    broken = pod(kubelet.terminated(65, "ModelCorrupt", restarts=3), name="prefill", of="p1")
    computed = compute(DECODE, broken, prefill=UNREADY)

    assert condition(computed, "Degraded") == ("True", "ModelCorrupt")
    assert condition(computed, "Ready")[0] == "True"
    assert condition(computed, "Stalled")[0] == "False"
    assert condition(computed, "RolloutComplete")[0] == "False"
    assert "prefill replicas" in message(computed, "RolloutComplete")
    assert computed["phase"] == "Degraded"
    assert (computed["lastFailure"]["reason"], computed["lastFailure"]["pod"]) == ("ModelCorrupt", "prefill")


def test_a_prefill_pod_without_a_node_is_not_scheduled() -> None:
    waits = kubelet.unschedulable("0/1 nodes are available: 1 Insufficient cpu.")
    for entry in waits["conditions"]:
        entry["lastTransitionTime"] = kubelet.at(-60)
    computed = compute(DECODE, pod(waits, name="prefill", of="p1"), prefill=UNREADY)

    assert condition(computed, "Scheduled") == ("False", "WaitingForNode")
    assert "Pod prefill has no node" in message(computed, "Scheduled")
    assert condition(computed, "Ready")[0] == "True"
    assert condition(computed, "Reconciling")[0] == "True"


@pytest.mark.parametrize("name", ["m", "m-prefill"])
def test_an_autoscaler_of_either_role_that_gets_no_metrics_is_shown(name: str) -> None:
    body = model_body(
        disaggregation={"prefill": {"autoscaling": {"maxReplicas": 2}}}, autoscaling={"maxReplicas": 2}
    )
    scalers = {}
    for each in ("m", "m-prefill"):
        is_bad = each == name
        found = {"type": "ScalingActive", "status": "False" if is_bad else "True"}
        found["reason"] = "FailedGetObjectMetric" if is_bad else "ValidMetricFound"
        scalers[Ref("HorizontalPodAutoscaler", each)] = {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": each},
            "status": {"conditions": [found]},
        }
    prefill = {**READY, "metadata": {**READY["metadata"], "name": "m-prefill", "uid": "d2"}}
    available = {"type": "Available", "status": "True", "lastTransitionTime": kubelet.at(-3600)}
    observed = Observed(
        body={**body, "status": {"conditions": [available]}},
        children={Ref("Deployment", "m"): READY, Ref("Deployment", "m-prefill"): prefill, **scalers},
    )
    computed = status.compute_status(spec.parse(body), observed, now=datetime.now(UTC))

    assert condition(computed, "ScalingActive") == ("False", "MetricsUnavailable")


def test_when_the_field_is_removed_the_status_loses_its_roles() -> None:
    before = compute(DECODE, PREFILL)
    after = compute(DECODE, prefill=None, disaggregation=None)

    assert transitions.merge_patch(before, after)["roles"] is None
