"""Conditions follow the rollout, keep their times, and never contradict each other."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.operator import pods as kubelet
from quire_operator import status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Sample
from quire_operator.status import Failure, transitions
from tests.operator.status.objects import FAILURES, Body, compute, condition, deployment, model_body, pod


@pytest.mark.parametrize(
    ("wanted", "max_unavailable", "of", "ready"),
    [
        (1, 1, deployment(ready=1), "True"),
        (1, 1, deployment(ready=0), "False"),
        (3, 1, deployment(replicas=3, ready=2), "True"),
        (3, 1, deployment(replicas=3, ready=1), "False"),
        (3, 9, deployment(replicas=3, ready=1), "True"),
        (1, 1, deployment(replicas=2, updated=1, ready=1), "False"),
        (1, 1, deployment(ready=1, seen=False), "False"),
    ],
)
def test_ready_requires_a_complete_rollout_and_enough_ready_replicas(
    wanted: int, max_unavailable: int, of: Body, ready: str
) -> None:
    body = model_body(replicas=wanted, disruption={"maxUnavailable": max_unavailable})

    assert condition(compute(of=of, body=body), "Ready")[0] == ready


def test_a_permanent_failure_is_stalled_when_it_is_repeated() -> None:
    once = compute(pod(kubelet.terminated(65, "ModelCorrupt")))
    twice = compute(pod(kubelet.terminated(65, "ModelCorrupt", restarts=1)))
    often = compute(pod(kubelet.terminated(70, "EngineCrashed", restarts=9)))

    assert condition(once, "Stalled")[0] == "False"
    assert condition(twice, "Stalled") == ("True", "ModelCorrupt")
    assert condition(twice, "Reconciling")[0] == "False"
    assert condition(often, "Stalled")[0] == "False", "a restart may help"
    assert twice["phase"] == "Failed"


def test_a_rollout_past_its_deadline_is_stalled() -> None:
    computed = compute(pod(kubelet.loading()), of=deployment(Progressing="ProgressDeadlineExceeded"))

    assert condition(computed, "Stalled") == ("True", "ProgressDeadlineExceeded")


def test_an_ownership_conflict_and_a_rejected_apply_are_stalled() -> None:
    observed = Observed(body=model_body(), foreign=(Ref("Service", "m"),))
    conflict = status.ownership_conflict(observed)
    refused = status.Failure(reason="ApplyRejected", detail="spec.replicas: too many")

    for problem in (conflict, refused):
        assert problem is not None
        computed = compute(problem=problem)
        assert condition(computed, "Stalled") == ("True", problem.reason)
        assert condition(computed, "Ready") == ("False", problem.reason)
        assert computed["lastFailure"]["reason"] == problem.reason
    assert conflict is not None and "Service m" in conflict.detail


def test_an_invalid_spec_is_stalled_and_the_replica_counts_are_kept() -> None:
    old = compute(pod(kubelet.ready()), of=deployment(ready=1))
    observed = Observed(
        body={**model_body(generation=3), "status": old},
        children={Ref("Deployment", "m"): deployment(ready=1)},
    )

    problem = Failure(reason="InvalidSpec", detail="spec.engine.env[0].name: not allowed")
    computed = status.compute_refused_status(observed, problem, now=datetime.now(UTC))

    assert condition(computed, "Stalled") == ("True", "InvalidSpec")
    assert condition(computed, "Available") == ("True", "Serving")
    assert computed["observedGeneration"] == 3
    assert computed["readyReplicas"] == 1
    assert "spec.engine.env[0].name" in computed["lastFailure"]["message"]


def test_last_transition_time_changes_only_with_the_status_of_a_condition() -> None:
    first = compute(pod(kubelet.loading()))
    for known in first["conditions"]:
        known["lastTransitionTime"] = "2020-01-01T00:00:00Z"

    now = datetime(2026, 1, 2, tzinfo=UTC)
    second = compute(pod(kubelet.ready()), of=deployment(ready=1), old=first, now=now)

    times = {c["type"]: c["lastTransitionTime"] for c in second["conditions"]}
    assert times["Ready"] == "2026-01-02T00:00:00Z"
    assert times["Degraded"] == "2020-01-01T00:00:00Z"
    assert {c["observedGeneration"] for c in second["conditions"]} == {2}


@pytest.mark.parametrize("reported", [*FAILURES.values(), kubelet.ready(), kubelet.loading()])
def test_an_unchanged_cluster_gives_an_unchanged_status(reported: Body) -> None:
    """What a restarted operator relies on: there is nothing to write."""
    first = compute(pod(reported))

    assert transitions.merge_patch(first, compute(pod(reported), old=first)) == {}


def test_load_progress_is_that_of_the_most_advanced_pod() -> None:
    samples = {
        "uid-m-0": Sample(phase="loading", loaded_bytes=10, total_bytes=100, eta_seconds=90),
        "uid-m-1": Sample(phase="loading", loaded_bytes=60, total_bytes=100, eta_seconds=40),
    }

    computed = compute(
        pod(kubelet.loading(), name="m-0"), pod(kubelet.loading(), name="m-1"), samples=samples
    )

    assert computed["model"] == {"bytesTotal": 100, "bytesLoaded": 60, "etaSeconds": 40}
    assert computed["loadingReplicas"] == 2


def test_the_status_contains_the_served_name_whether_explicit_or_default() -> None:
    """`kubectl get -o wide` prints it in the column MODEL."""
    given = model_body(model={"source": {"pvc": {"claimName": "models"}}, "servedName": "org/m"})

    assert compute(pod(kubelet.ready()))["servedName"] == "m"
    assert compute(pod(kubelet.ready()), body=given)["servedName"] == "org/m"


@pytest.mark.parametrize("fields", [{"suspend": True}, {"replicas": 0}])
def test_a_suspended_deployment_is_neither_ready_nor_reconciling_nor_stalled(fields: Body) -> None:
    computed = compute(of=deployment(replicas=0), body=model_body(**fields))

    assert computed["phase"] == "Suspended"
    assert condition(computed, "Ready") == ("False", "Suspended")
    assert condition(computed, "Reconciling")[0] == condition(computed, "Stalled")[0] == "False"


def test_a_replica_without_a_node_is_denied_by_no_condition_while_another_serves() -> None:
    def computed(ago: float) -> Body:
        lacks = kubelet.condition("PodScheduled", "False", reason="Unschedulable", message=IN_USE, ago=ago)
        waiting = pod({"phase": "Pending", "conditions": [lacks]}, name="m-1")
        two = model_body(replicas=2)
        return compute(pod(kubelet.ready()), waiting, of=deployment(replicas=2, ready=1), body=two)

    young, old = computed(1), computed(10)

    assert condition(young, "Scheduled") == ("Unknown", "AwaitingNode")
    assert status.changes_without_event(young), "it is looked at again"
    assert condition(old, "Ready") == ("True", "MinimumReplicasReady")
    assert condition(old, "Scheduled") == ("False", "WaitingForGPU")
    assert condition(old, "Reconciling") == ("True", "WaitingForGPU")
    messages = {c["type"]: c["message"] for c in old["conditions"]}
    assert "Pod m-1 has no node." in messages["Scheduled"]
    assert f"all nvidia.com/gpu are in use: {LACKS}" in messages["Scheduled"]
    assert messages["Reconciling"].startswith("1 of 2 replicas ready. Pod m-1 has no node.")
    assert [event.reason for event in transitions.events(young, old)] == ["WaitingForGPU"]


def test_without_an_accelerator_in_the_cluster_none_is_said_to_be_in_use() -> None:
    computed = compute(pod(kubelet.unschedulable(f"{LACKS} 1 Preemption is not helpful for scheduling.")))

    said = " ".join(c["message"] for c in computed["conditions"])
    assert "no node that may take the pod has nvidia.com/gpu" in said and "in use" not in said


LACKS = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available:"
IN_USE = f"{LACKS} 1 No preemption victims found for incoming pod."
POD_STATUSES = st.sampled_from([*FAILURES.values(), kubelet.ready(), kubelet.loading(), {"phase": "Failed"}])


@given(
    st.lists(POD_STATUSES, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([None, "ApplyRejected", "QuotaExceeded", "OwnershipConflict"]),
)
def test_ready_reconciling_and_stalled_never_contradict_each_other(
    reported: list[Body], wanted: int, replicas: int, ready: int, seen: bool, problem: str | None
) -> None:
    """kstatus reads Reconciling before Stalled before Ready: at most one may be True, but for replicas that
    get no pod or no node while others serve.
    """
    computed = compute(
        *(pod(each, name=f"m-{i}") for i, each in enumerate(reported)),
        of=deployment(replicas=replicas, ready=min(ready, replicas), seen=seen),
        body=model_body(replicas=wanted),
        problem=None if problem is None else status.Failure(reason=problem),
    )

    is_true = {c["type"] for c in computed["conditions"] if c["status"] == "True"}
    if condition(computed, "Scheduled")[0] != "False":
        assert len(is_true & {"Ready", "Reconciling", "Stalled"}) <= 1
    assert not {"Ready", "Stalled"} <= is_true and not {"Reconciling", "Stalled"} <= is_true
    if wanted and not problem:
        assert is_true & {"Ready", "Reconciling", "Stalled"}
    assert all(c["reason"] and c["message"] and c["observedGeneration"] == 2 for c in computed["conditions"])
    assert transitions.merge_patch(computed, computed) == {}


def test_desired_replicas_are_those_that_are_wanted_and_not_those_that_exist() -> None:
    refused = compute(of=deployment(replicas=1, ready=1), body=model_body(replicas=3))
    suspended = compute(of=deployment(replicas=1, ready=1), body=model_body(replicas=3, suspend=True))
    scaled = deployment(replicas=1, ready=1)
    scaled["spec"]["replicas"] = 4
    autoscaled = compute(of=scaled, body=model_body(autoscaling={"maxReplicas": 8}))

    assert [each["desiredReplicas"] for each in (refused, suspended, autoscaled)] == [3, 0, 4]
    assert refused["replicas"] == 1
