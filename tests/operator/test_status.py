"""The status says what is, names every failure with its remedy, and never contradicts itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.errors import SpecError
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Sample
from quire_operator.status import reasons, transitions
from tests.operator.fake_api import merged

Body = dict[str, Any]

NOW = datetime.now(UTC)


def model_body(generation: int = 2, **fields: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": generation},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **fields,
        },
    }


def deployment(
    *, replicas: int = 1, updated: int | None = None, ready: int = 0, seen: bool = True, **conditions: str
) -> Body:
    return {
        "kind": "Deployment",
        "metadata": {"name": "m", "uid": "d1", "generation": 4},
        "spec": {
            "template": {"spec": {"containers": [{"name": "server", "image": "engine:1"}]}},
            "paused": False,
        },
        "status": {
            "observedGeneration": 4 if seen else 3,
            "replicas": replicas,
            "updatedReplicas": replicas if updated is None else updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [
                {"type": kind, "status": "False", "reason": reason} for kind, reason in conditions.items()
            ],
        },
    }


def replica_set(uid: str, revision: int) -> Body:
    return {
        "kind": "ReplicaSet",
        "metadata": {
            "name": uid,
            "uid": uid,
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        },
    }


def pod(told: Body, *, name: str = "m-0", of: str = "rs2", node: str = "node-1") -> Body:
    placed = "False" not in [c["status"] for c in told.get("conditions", ()) if c["type"] == "PodScheduled"]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": kubelet.at(-60),
            "ownerReferences": [{"controller": True, "uid": of}],
        },
        "spec": {
            "nodeName": node if placed else "",
            "containers": [{"name": "server", "image": "engine:1"}],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}],
        },
        "status": told,
    }


def compute(
    *pods: Body, of: Body | None = None, body: Body | None = None, old: Body | None = None, **fields: Any
) -> Body:
    body = body or model_body()
    problem = fields.pop("problem", None)
    observed = Observed(
        body={**body, "status": old or {}},
        children={Ref("Deployment", "m"): of or deployment()},
        replica_sets=(replica_set("rs1", 1), replica_set("rs2", 2)),
        pods=pods,
        **fields,
    )
    return status.of(spec.parse(body), observed, now=NOW, problem=problem)


def condition(computed: Body, kind: str) -> tuple[str, str]:
    (found,) = [c for c in computed["conditions"] if c["type"] == kind]
    return found["status"], found["reason"]


FAILURES: dict[str, Body] = {
    "ModelNotFound": kubelet.terminated(66, "ModelNotFound"),
    "ModelCorrupt": kubelet.terminated(65, "ModelCorrupt"),
    "ConfigError": kubelet.terminated(2, "ConfigError"),
    "StartupTimeout": kubelet.terminated(74, "StartupTimeout"),
    "LoadStalled": kubelet.terminated(75, "LoadStalled"),
    "OOMKilled": kubelet.killed_for_memory(),
    "EngineCrashed": kubelet.terminated(70, "EngineCrashed"),
    "EngineStalled": kubelet.terminated(71, "EngineStalled"),
    "ImagePullFailed": kubelet.waiting("ImagePullBackOff", 'Back-off pulling image "engine:1"'),
    "WaitingForNode": kubelet.unschedulable("0/1 nodes are available: 1 Insufficient cpu."),
    "VolumePending": kubelet.unschedulable("pod has unbound immediate PersistentVolumeClaims"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failure_is_in_conditions_and_last_failure_with_its_remedy(reason: str) -> None:
    computed = compute(pod(FAILURES[reason]))

    assert condition(computed, "Ready") == ("False", reason)
    assert condition(computed, "Degraded") == ("True", reason)
    assert computed["lastFailure"]["reason"] == reason
    assert computed["lastFailure"]["pod"] == "m-0"
    assert reasons.REASONS[reason].remedy[1:] in computed["lastFailure"]["message"]
    is_placed = reason not in ("WaitingForNode", "VolumePending")
    assert condition(computed, "Scheduled")[0] == ("True" if is_placed else "False")


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (kubelet.waiting("ErrImagePull", "unauthorized"), "ImagePullFailed"),
        (kubelet.waiting("InvalidImageName", "bad"), "ImagePullFailed"),
        (kubelet.waiting("CreateContainerConfigError", 'secret "keys" not found'), "ConfigError"),
        (kubelet.not_mounted(), "VolumePending"),
        (kubelet.status(kubelet.running(last=kubelet.end(139), restarts=1)), "EngineCrashed"),
        (kubelet.status(kubelet.running(last=kubelet.end(66), restarts=1)), "ModelNotFound"),
        (kubelet.status(kubelet.running(last=kubelet.end(137, "Error"), restarts=1)), "EngineCrashed"),
    ],
)
def test_what_only_kubernetes_says_has_a_reason_too(told: Body, reason: str) -> None:
    assert condition(compute(pod(told)), "Degraded") == ("True", reason)


def test_a_kubelets_word_on_memory_outweighs_what_the_container_wrote() -> None:
    text = '{"reason": "EngineCrashed", "message": "a child was killed", "exitCode": 137}'
    told = kubelet.status(kubelet.running(last=kubelet.end(137, "OOMKilled", text), restarts=1))

    computed = compute(pod(told))

    assert computed["lastFailure"]["reason"] == "OOMKilled"
    assert computed["lastFailure"]["exitCode"] == 137


def test_both_forms_of_a_failed_pull_read_the_same() -> None:
    first = compute(pod(kubelet.waiting("ErrImagePull", "not found")))
    then = compute(
        pod(kubelet.waiting("ImagePullBackOff", 'Back-off pulling image "engine:1": ErrImagePull: not found'))
    )

    assert first["lastFailure"]["message"] == then["lastFailure"]["message"]


def test_a_clean_exit_and_an_old_end_are_no_failures() -> None:
    drained = kubelet.status(kubelet.running(last=kubelet.end(0, "Completed"), restarts=1))
    served_since = kubelet.status(
        kubelet.running(since=600, last=kubelet.end(71), restarts=1),
        conditions=(kubelet.condition("PodScheduled", "True"), kubelet.condition("Ready", "False", ago=5)),
    )

    assert condition(compute(pod(drained)), "Degraded") == ("False", "AsExpected")
    assert condition(compute(pod(served_since)), "Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(phase="serving", reason="CanaryMismatch"), "CanaryMismatch"),
        (Sample(phase="serving", reason="CanaryStale"), "CanaryStale"),
        (Sample(phase="stalled"), "EngineStalled"),
    ],
)
def test_a_pod_that_is_alive_and_unready_is_told_by_what_it_says(sample: Sample, reason: str) -> None:
    computed = compute(pod(kubelet.loading()), samples={"uid-m-0": sample})

    assert condition(computed, "Ready") == ("False", reason)


@pytest.mark.parametrize(
    "claim", ["OwnershipConflict", "QuotaExceeded", "InvalidSpec", "OOMKilled", "Nonsense"]
)
def test_a_pod_cannot_speak_of_what_is_not_its_own(claim: str) -> None:
    said = compute(pod(kubelet.loading()), samples={"uid-m-0": Sample(phase="loading", reason=claim)})
    wrote = compute(pod(kubelet.terminated(70, claim)))

    assert condition(said, "Ready") == ("False", "Loading")
    assert wrote["lastFailure"]["reason"] == "EngineCrashed"


def test_a_ready_pod_is_not_failing_whatever_it_says() -> None:
    liar = {"uid-m-0": Sample(phase="stalled", reason="EngineStalled")}

    assert (
        condition(compute(pod(kubelet.ready()), of=deployment(ready=1), samples=liar), "Ready")[0] == "True"
    )


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
def test_ready_is_a_complete_rollout_and_enough_ready_replicas(
    wanted: int, max_unavailable: int, of: Body, ready: str
) -> None:
    body = model_body(replicas=wanted, disruption={"maxUnavailable": max_unavailable})

    assert condition(compute(of=of, body=body), "Ready")[0] == ready


def test_a_final_failure_stalls_when_it_is_repeated() -> None:
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


def test_a_missing_object_of_somebody_else_and_a_refused_object_are_stalled() -> None:
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


def test_an_invalid_spec_is_stalled_and_what_serves_keeps_its_numbers() -> None:
    old = compute(pod(kubelet.ready()), of=deployment(ready=1))
    observed = Observed(
        body={**model_body(generation=3), "status": old},
        children={Ref("Deployment", "m"): deployment(ready=1)},
    )

    computed = status.invalid(observed, SpecError("spec.engine.env[0].name", "not allowed"), now=NOW)

    assert condition(computed, "Stalled") == ("True", "InvalidSpec")
    assert condition(computed, "Available") == ("True", "Serving")
    assert computed["observedGeneration"] == 3
    assert computed["readyReplicas"] == 1
    assert "spec.engine.env[0].name" in computed["lastFailure"]["message"]


def test_a_quota_that_refuses_pods_is_named_without_the_random_pod() -> None:
    refused = deployment(replicas=0)
    refused["status"]["conditions"] = [
        {
            "type": "ReplicaFailure",
            "status": "True",
            "reason": "FailedCreate",
            "message": 'pods "m-abc12" is forbidden: exceeded quota: small, requested: pods=1',
            "lastTransitionTime": kubelet.at(-10),
        }
    ]

    computed = compute(of=refused)

    assert condition(computed, "Ready") == ("False", "QuotaExceeded")
    assert (
        "small" in computed["lastFailure"]["message"] and "m-abc12" not in computed["lastFailure"]["message"]
    )


def test_times_stay_while_a_status_stays() -> None:
    first = compute(pod(kubelet.loading()))
    for known in first["conditions"]:
        known["lastTransitionTime"] = "2020-01-01T00:00:00Z"

    second = compute(pod(kubelet.ready()), of=deployment(ready=1), old=first)

    times = {c["type"]: c["lastTransitionTime"] for c in second["conditions"]}
    assert times["Ready"] == status.timestamp(NOW)
    assert times["Degraded"] == "2020-01-01T00:00:00Z"
    assert {c["observedGeneration"] for c in second["conditions"]} == {2}


@pytest.mark.parametrize("told", [*FAILURES.values(), kubelet.ready(), kubelet.loading()])
def test_the_same_cluster_gives_the_same_status_again(told: Body) -> None:
    """What a restarted operator relies on: there is nothing to write."""
    first = compute(pod(told))

    assert transitions.merge_patch(first, compute(pod(told), old=first)) == {}


def test_a_failure_is_kept_after_it_has_healed_and_gives_way_to_a_newer_one() -> None:
    failed = compute(pod(kubelet.terminated(70, "EngineCrashed")))
    healed = compute(pod(kubelet.ready()), of=deployment(ready=1), old=failed)
    again = compute(pod(kubelet.unschedulable("no node")), old=healed)

    assert healed["lastFailure"] == failed["lastFailure"]
    assert condition(healed, "Degraded")[0] == "False"
    assert again["lastFailure"]["reason"] == "WaitingForNode"


def test_two_failing_pods_do_not_take_turns() -> None:
    a, b = kubelet.terminated(70, "EngineCrashed"), kubelet.unschedulable("no node")
    first = compute(pod(b, name="m-9"))
    both = compute(pod(a, name="m-0"), pod(b, name="m-9"), old=first)

    assert condition(both, "Degraded") == condition(first, "Degraded") == ("True", "WaitingForNode")


def test_progress_is_that_of_the_furthest_pod() -> None:
    samples = {
        "uid-m-0": Sample(phase="loading", loaded_bytes=10, total_bytes=100, eta_seconds=90),
        "uid-m-1": Sample(phase="loading", loaded_bytes=60, total_bytes=100, eta_seconds=40),
    }

    computed = compute(
        pod(kubelet.loading(), name="m-0"), pod(kubelet.loading(), name="m-1"), samples=samples
    )

    assert computed["model"] == {"bytesTotal": 100, "bytesLoaded": 60, "etaSeconds": 40}
    assert computed["loadingReplicas"] == 2


@pytest.mark.parametrize("fields", [{"suspend": True}, {"replicas": 0}])
def test_a_suspended_deployment_is_neither_ready_nor_at_work(fields: Body) -> None:
    computed = compute(of=deployment(replicas=0), body=model_body(**fields))

    assert computed["phase"] == "Suspended"
    assert condition(computed, "Ready") == ("False", "Suspended")
    assert condition(computed, "Reconciling")[0] == condition(computed, "Stalled")[0] == "False"


TOLD = st.sampled_from([*FAILURES.values(), kubelet.ready(), kubelet.loading(), {"phase": "Failed"}])


@given(
    st.lists(TOLD, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([None, "ApplyRejected", "QuotaExceeded", "OwnershipConflict"]),
)
def test_ready_reconciling_and_stalled_never_contradict_each_other(
    told: list[Body], wanted: int, replicas: int, ready: int, seen: bool, problem: str | None
) -> None:
    """kstatus reads Reconciling before Stalled before Ready: at most one may be True."""
    computed = compute(
        *(pod(each, name=f"m-{i}") for i, each in enumerate(told)),
        of=deployment(replicas=replicas, ready=min(ready, replicas), seen=seen),
        body=model_body(replicas=wanted),
        problem=None if problem is None else status.Failure(reason=problem),
    )

    is_true = {c["type"] for c in computed["conditions"] if c["status"] == "True"}
    assert len(is_true & {"Ready", "Reconciling", "Stalled"}) <= 1
    if wanted and not problem:
        assert is_true & {"Ready", "Reconciling", "Stalled"}
    assert all(c["reason"] and c["message"] and c["observedGeneration"] == 2 for c in computed["conditions"])
    assert transitions.merge_patch(computed, computed) == {}


def with_conditions(**told: tuple[str, str]) -> Body:
    return {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": reason}
            for kind, (value, reason) in told.items()
        ]
    }


def test_an_event_is_told_once_for_each_new_reason() -> None:
    fine = with_conditions(Degraded=("False", "AsExpected"), Stalled=("False", "Progressing"))
    bad = with_conditions(Degraded=("True", "OOMKilled"), Stalled=("False", "Progressing"))
    worse = with_conditions(Degraded=("True", "ModelCorrupt"), Stalled=("True", "ModelCorrupt"))

    assert [e.reason for e in transitions.events(fine, bad)] == ["OOMKilled"]
    assert transitions.events(bad, bad) == ()
    assert [e.reason for e in transitions.events(bad, worse)] == ["ModelCorrupt"]
    assert transitions.events(worse, fine) == ()
    assert [e.reason for e in transitions.events(fine, bad)] == ["OOMKilled"]


def test_becoming_ready_is_told_and_staying_ready_is_not() -> None:
    ready = with_conditions(Ready=("True", "AllReplicasReady"))

    assert [(e.kind, e.reason) for e in transitions.events({}, ready)] == [("Normal", "Ready")]
    assert transitions.events(ready, ready) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


@given(st.dictionaries(st.sampled_from("abc"), JSON), st.dictionaries(st.sampled_from("abc"), JSON))
def test_the_patch_makes_the_old_status_into_the_new(old: Body, new: Body) -> None:
    old, new = without_nulls(old), without_nulls(new)

    assert merged(old, transitions.merge_patch(old, new)) == new


def test_only_progress_may_wait() -> None:
    assert transitions.is_progress_only({"model": {"bytesLoaded": 5}})
    assert not transitions.is_progress_only({"model": {"bytesLoaded": 5}, "phase": "Loading"})
    assert not transitions.is_progress_only({"model": {"bytesTotal": 5}})


def test_every_reason_says_what_happened_and_what_to_do() -> None:
    for name, reason in reasons.REASONS.items():
        text = reasons.message(name, "a detail.")
        assert "(a detail)" in text and text.endswith(".") and len(reason.remedy) > 20
