"""Pods that are disrupted, or wait for others, are reported by what Kubernetes says of them, each once."""

from __future__ import annotations

import pytest

from e2e.operator import pods as kubelet
from quire_operator.status import transitions
from tests.operator.status.objects import Body, compute, condition, deployment, pod


def going(reported: Body) -> Body:
    body = pod(reported)
    body["metadata"]["deletionTimestamp"] = kubelet.at()
    return body


def gated(gate: str) -> Body:
    body = pod(kubelet.gated())
    body["spec"] |= {"nodeName": "", "schedulingGates": [{"name": gate}]}
    return body


DISRUPTED = {
    "Evicted": going(kubelet.disrupted("EvictionByEvictionAPI", "Eviction API: evicting")),
    "Evicted by a taint": going(
        kubelet.disrupted("DeletionByTaintManager", "deleting due to NoExecute taint")
    ),
    "Evicted by the kubelet": pod(kubelet.put_out("Evicted", "The node was low on resource: memory.")),
    "Evicted at the door": pod(kubelet.put_out("UnexpectedAdmissionError", "no healthy devices")),
    "Preempted": going(kubelet.disrupted("PreemptionByScheduler", "preempting to accommodate another")),
    "Preempted by the kubelet": pod(kubelet.put_out("Preempting", "to admit critical pods")),
    "NodeLost": going(kubelet.disrupted("DeletionByPodGC", "node no longer exists")),
    "NodeLost long ago": pod(kubelet.put_out("NodeLost", "Node n which was running pod m is unresponsive")),
}


@pytest.mark.parametrize("name", DISRUPTED)
def test_a_disrupted_pod_is_reported_in_last_failure_and_one_event_and_not_as_degraded(name: str) -> None:
    reason = name.partition(" ")[0]
    other = pod(kubelet.ready(), name="m-1")

    reported = compute(DISRUPTED[name], other, of=deployment(ready=1))
    again = compute(DISRUPTED[name], other, of=deployment(ready=1), old=reported)
    after = compute(other, of=deployment(ready=1), old=again)

    assert (reported["lastFailure"]["reason"], reported["lastFailure"]["pod"]) == (reason, "m-0")
    assert condition(reported, "Degraded") == ("False", "AsExpected")
    assert [(e.kind, e.reason) for e in transitions.events({}, reported)][0] == ("Warning", reason)
    assert transitions.merge_patch(reported, again) == {} and transitions.events(reported, again) == ()
    assert after["lastFailure"] == reported["lastFailure"], "it is kept when the pod is gone"


def test_two_evicted_pods_give_two_events() -> None:
    first = going(kubelet.disrupted("EvictionByEvictionAPI", "evicting"))
    second = going(kubelet.disrupted("EvictionByEvictionAPI", "evicting"))
    second["metadata"] |= {"name": "m-1", "uid": "uid-m-1"}

    one = compute(first)
    other = compute(second, old=one)

    assert [e.reason for e in transitions.events(one, other)] == ["Evicted"]


def test_an_evicted_pod_that_is_killed_is_still_reported_as_evicted() -> None:
    """Its time to drain was over, and it was killed."""
    body = going(kubelet.disrupted("DeletionByTaintManager", "deleting due to NoExecute taint"))
    body["status"]["containerStatuses"] = [kubelet.container(kubelet.end(137))]

    assert compute(body)["lastFailure"]["reason"] == "Evicted"


def test_a_lost_node_is_reported_once_and_before_its_pods_are_deleted() -> None:
    lost, then = compute(pod(kubelet.silent())), going(kubelet.silent())
    later = compute(then, old=lost)

    assert condition(lost, "Degraded") == ("True", "NodeLost")
    assert lost["loadingReplicas"] == 0, "what the kubelet said last is not true any more"
    assert [e.reason for e in transitions.events({}, lost)] == ["NodeLost"]
    assert transitions.events(lost, later) == ()


@pytest.mark.parametrize(
    "ready",
    [
        kubelet.condition("Ready", "False", reason="ReadinessGatesNotReady"),
        kubelet.condition("Ready", "False", reason="ContainersNotReady"),
    ],
)
def test_a_pod_whose_readiness_has_a_reason_is_not_reported_as_on_a_lost_node(ready: Body) -> None:
    reported = {**kubelet.ready(), "conditions": [ready, kubelet.condition("ContainersReady", "True")]}

    assert "lastFailure" not in compute(pod(reported))


def test_a_pod_gated_by_kueue_waits_for_quota_and_one_with_another_gate_for_a_node() -> None:
    by_kueue, by_others = compute(gated("kueue.x-k8s.io/admission")), compute(gated("example.com/review"))

    assert condition(by_kueue, "Degraded") == ("True", "WaitingForQuota")
    assert condition(by_kueue, "Scheduled") == ("False", "WaitingForQuota")
    assert (by_kueue["phase"], by_others["phase"]) == ("Pending", "WaitingForNode")
    assert "example.com/review" in by_others["lastFailure"]["message"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient nvidia.com/gpu.", "WaitingForGPU"),
        ("0/3 nodes are available: 3 Insufficient memory.", "WaitingForNode"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", "WaitingForNode"),
        ('persistentvolumeclaim "models" not found', "VolumePending"),
    ],
)
def test_the_reason_of_an_unschedulable_pod_follows_from_the_schedulers_message(
    message: str, reason: str
) -> None:
    reported = compute(pod(kubelet.unschedulable(message)))

    assert condition(reported, "Degraded") == ("True", reason)
    assert reported["phase"] == {"VolumePending": "Pending"}.get(reason, reason)
