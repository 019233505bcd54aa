"""Every failure has a reason and a remedy; what a pod reports counts only for itself."""

from __future__ import annotations

import pytest

from e2e.operator import pods as kubelet
from quire_operator.reports import RankReport, Sample
from quire_operator.status import reasons, transitions
from tests.operator.status.objects import FAILURES, Body, compute, condition, deployment, pod


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failure_is_reported_in_conditions_and_last_failure_with_its_remedy(reason: str) -> None:
    computed = compute(pod(FAILURES[reason]))

    assert condition(computed, "Ready") == ("False", reason)
    assert condition(computed, "Degraded") == ("True", reason)
    assert computed["lastFailure"]["reason"] == reason
    assert computed["lastFailure"]["pod"] == "m-0"
    assert reasons.REASONS[reason].remedy[1:] in computed["lastFailure"]["message"]
    is_placed = reason not in ("WaitingForGPU", "WaitingForNode", "VolumePending")
    assert condition(computed, "Scheduled")[0] == ("True" if is_placed else "False")


@pytest.mark.parametrize(
    ("reported", "reason"),
    [
        (kubelet.waiting("ErrImagePull", "unauthorized"), "ImagePullFailed"),
        (kubelet.waiting("InvalidImageName", "bad"), "ImagePullFailed"),
        (kubelet.waiting("CreateContainerConfigError", 'secret "keys" not found'), "ConfigError"),
        (kubelet.status(kubelet.running(last=kubelet.end(139), restarts=1)), "EngineCrashed"),
        (kubelet.status(kubelet.running(last=kubelet.end(66), restarts=1)), "ModelNotFound"),
        (kubelet.status(kubelet.running(last=kubelet.end(137, "Error"), restarts=1)), "EngineCrashed"),
    ],
)
def test_a_failure_that_only_kubernetes_reports_has_a_reason_too(reported: Body, reason: str) -> None:
    assert condition(compute(pod(reported)), "Degraded") == ("True", reason)


def test_a_pod_without_a_sandbox_is_volume_pending_only_with_a_mount_error() -> None:
    why = 'MountVolume.SetUp failed for volume "keys": secret "keys" not found'

    pulling = compute(pod(kubelet.not_mounted()))
    mounting = compute(pod(kubelet.not_mounted()), mount_errors={"uid-m-0": why})

    assert condition(pulling, "Degraded") == ("False", "AsExpected")
    assert condition(mounting, "Degraded") == ("True", "VolumePending")
    assert 'secret "keys" not found' in mounting["lastFailure"]["message"]


def test_a_short_wait_for_a_node_is_not_degraded_and_a_long_one_is() -> None:
    def waits(ago: float) -> Body:
        condition_of_now = kubelet.condition("PodScheduled", "False", reason="Unschedulable", ago=ago)
        return compute(pod({"phase": "Pending", "conditions": [condition_of_now]}))

    assert condition(waits(1), "Degraded") == ("False", "AsExpected")
    assert condition(waits(3600), "Degraded") == ("True", "WaitingForNode")


def test_oom_killed_from_the_kubelet_overrides_the_termination_message() -> None:
    text = '{"reason": "EngineCrashed", "message": "a child was killed", "exitCode": 137}'
    reported = kubelet.status(kubelet.running(last=kubelet.end(137, "OOMKilled", text), restarts=1))

    computed = compute(pod(reported))

    assert computed["lastFailure"]["reason"] == "OOMKilled"
    assert computed["lastFailure"]["exitCode"] == 137


def test_err_image_pull_and_image_pull_back_off_give_the_same_message() -> None:
    first = compute(pod(kubelet.waiting("ErrImagePull", "not found")))
    then = compute(
        pod(kubelet.waiting("ImagePullBackOff", 'Back-off pulling image "engine:1": ErrImagePull: not found'))
    )

    assert first["lastFailure"]["message"] == then["lastFailure"]["message"]


def test_drained_pods_and_earlier_terminations_are_no_failures() -> None:
    drained = pod(kubelet.status(kubelet.container(kubelet.end(0, "Completed"))))
    drained["metadata"]["deletionTimestamp"] = kubelet.at()
    evicted = pod({**kubelet.status(kubelet.container(kubelet.end(0, "Completed"))), "phase": "Failed"})
    served_since = kubelet.status(
        kubelet.running(since=600, last=kubelet.end(71), restarts=1),
        conditions=(kubelet.condition("PodScheduled", "True"), kubelet.condition("Ready", "False", ago=5)),
    )

    for body in (drained, evicted, pod(served_since)):
        assert condition(compute(body), "Degraded") == ("False", "AsExpected")
    assert "lastFailure" not in compute(drained, evicted)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample(phase="serving", reason="CanaryMismatch"), "CanaryMismatch"),
        (Sample(phase="serving", reason="CanaryStale"), "CanaryStale"),
        (Sample(phase="stalled"), "EngineStalled"),
        (Sample(phase="stalled", reason="ProcessStalled"), "ProcessStalled"),
    ],
)
def test_an_unready_pod_is_reported_with_the_reason_that_it_gives(sample: Sample, reason: str) -> None:
    computed = compute(pod(kubelet.loading()), samples={"uid-m-0": sample})

    assert condition(computed, "Ready") == ("False", reason)


def test_the_rank_that_does_not_run_is_named_also_after_a_restart_of_the_operator() -> None:
    stalled = Sample(phase="stalled", reason="ProcessStalled", silent=("rank 2",))
    unready = pod(kubelet.loading())
    computed = compute(unready, samples={"uid-m-0": stalled})

    assert "(not running: rank 2)" in computed["lastFailure"]["message"]
    (degraded,) = [c for c in computed["conditions"] if c["type"] == "Degraded"]
    assert "rank 2" in degraded["message"]
    assert compute(unready, old=computed)["lastFailure"] == computed["lastFailure"]


@pytest.mark.parametrize(
    ("steps", "missing", "expected"),
    [
        ((9, 9, 7), ("", "", ""), "rank 2 is behind: step 7 of 9"),
        ((9, 8, 8), ("", "", "NotEchoed"), "rank 2 is behind: NotEchoed, step 8 of 9"),
        ((0, 0, 0), ("", "NotStarted", ""), "rank 1 is behind: NotStarted, step 0 of 0"),
        ((9, 9, 9), ("", "", ""), ""),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(
    steps: tuple[int, ...], missing: tuple[str, ...], expected: str
) -> None:
    ranks = tuple(
        RankReport(rank=rank, last_step=step, missing=why)
        for rank, (step, why) in enumerate(zip(steps, missing, strict=True))
    )
    computed = compute(pod(kubelet.loading()), samples={"uid-m-0": Sample(phase="stalled", ranks=ranks)})

    message = computed["lastFailure"]["message"]
    assert f"({expected})" in message if expected else "rank" not in message


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (RankReport(rank=1, last_step=8, missing="NotEchoed", host="m-0-1"), "rank 1 in pod m-0-1 is behind"),
        (RankReport(rank=1, last_step=8, host="m-0"), "rank 1 is behind: step 8 of 9"),
        (
            RankReport(rank=1, last_step=9, host="m-0-1", step_micros=250_000),
            "rank 1 in pod m-0-1 is slow: 0.25 s for a step",
        ),
    ],
)
def test_a_rank_of_another_pod_is_named_with_its_pod(rank: RankReport, expected: str) -> None:
    ranks = (RankReport(rank=0, last_step=9, host="m-0", step_micros=1000), rank)
    computed = compute(pod(kubelet.loading()), samples={"uid-m-0": Sample(phase="stalled", ranks=ranks)})

    assert expected in computed["lastFailure"]["message"]


@pytest.mark.parametrize(
    "claim", ["OwnershipConflict", "QuotaExceeded", "InvalidSpec", "OOMKilled", "Nonsense"]
)
def test_a_pod_cannot_report_a_reason_that_is_not_its_own(claim: str) -> None:
    said = compute(pod(kubelet.loading()), samples={"uid-m-0": Sample(phase="loading", reason=claim)})
    wrote = compute(pod(kubelet.terminated(70, claim)))

    assert condition(said, "Ready") == ("False", "Loading")
    assert wrote["lastFailure"]["reason"] == "EngineCrashed"


def test_a_ready_pod_is_not_failing_whatever_it_reports() -> None:
    liar = {"uid-m-0": Sample(phase="stalled", reason="EngineStalled")}

    assert (
        condition(compute(pod(kubelet.ready()), of=deployment(ready=1), samples=liar), "Ready")[0] == "True"
    )


def test_an_exceeded_quota_is_reported_without_the_generated_pod_name() -> None:
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
    assert condition(computed, "Scheduled") == ("False", "QuotaExceeded")
    assert (
        "small" in computed["lastFailure"]["message"] and "m-abc12" not in computed["lastFailure"]["message"]
    )


def test_last_failure_is_kept_after_recovery_and_replaced_by_a_newer_failure() -> None:
    failed = compute(pod(kubelet.terminated(70, "EngineCrashed")))
    healed = compute(pod(kubelet.ready()), of=deployment(ready=1), old=failed)
    again = compute(pod(kubelet.unschedulable("no node")), old=healed)

    assert healed["lastFailure"] == failed["lastFailure"]
    assert condition(healed, "Degraded")[0] == "False"
    assert again["lastFailure"]["reason"] == "WaitingForNode"


def test_with_two_failing_pods_the_reported_reason_does_not_alternate() -> None:
    a, b = kubelet.terminated(70, "EngineCrashed"), kubelet.unschedulable("no node")
    first = compute(pod(b, name="m-9"))
    both = compute(pod(a, name="m-0"), pod(b, name="m-9"), old=first)

    assert condition(both, "Degraded") == condition(first, "Degraded") == ("True", "WaitingForNode")


def test_every_reason_has_a_message_with_the_detail_and_a_remedy() -> None:
    for name, reason in reasons.REASONS.items():
        text = reasons.message(name, "a detail.")
        assert "(a detail)" in text and text.endswith(".") and len(reason.remedy) > 20


def test_a_reported_failure_survives_an_operator_restart_until_the_pod_reports_otherwise() -> None:
    mismatch, fine = Sample(phase="serving", reason="CanaryMismatch"), Sample(phase="serving")
    said = compute(pod(kubelet.loading()), samples={"uid-m-0": mismatch})

    not_asked_yet = compute(pod(kubelet.loading()), old=said)
    healed = compute(pod(kubelet.loading()), samples={"uid-m-0": fine}, old=said)
    another_pod = compute(pod(kubelet.loading(), name="m-1"), old=said)
    another_life = compute(pod(kubelet.status(kubelet.running(since=-5))), old=said)

    assert not_asked_yet == said
    for after in (healed, another_pod, another_life, compute(pod(kubelet.loading()), old=healed)):
        assert condition(after, "Degraded") == ("False", "AsExpected")


def test_a_restart_is_one_failure_even_if_the_next_container_answers_before_the_kubelet_reports_it() -> None:
    stalled, starting = {"uid-m-0": Sample(phase="stalled")}, {"uid-m-0": Sample(phase="loading")}
    said = compute(pod(kubelet.loading()), samples=stalled)

    answers_already = compute(pod(kubelet.loading()), samples=starting, old=said)
    restarted = kubelet.running(
        since=-5, last=kubelet.end(71, message='{"reason": "EngineStalled"}'), restarts=1
    )
    reported = compute(pod(kubelet.status(restarted)), samples=starting, old=answers_already)

    for earlier, later in ((said, answers_already), (answers_already, reported)):
        assert condition(later, "Degraded") == ("True", "EngineStalled")
        assert not transitions.events(earlier, later)
