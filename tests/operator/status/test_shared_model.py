"""The status of a model that a Job downloads: ModelCached, progress, and each way of failing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.api import specs
from e2e.operator import pods as kubelet
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Sample
from quire_operator.status import transitions
from tests.operator.status import objects

SOURCE = specs.DOWNLOADED[4]["spec"]
BODY = objects.model_body(model=SOURCE["model"], cache=SOURCE["cache"])
MODEL = spec.parse(BODY)
COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": kubelet.at(-40)}
SAMPLE = Sample(phase="downloading", loaded_bytes=4, total_bytes=16, eta_seconds=3, bytes_per_second=4)


def failed(reason: str = "PodFailurePolicy") -> objects.Body:
    return {"conditions": [{"type": "Failed", "status": "True", "reason": reason, "message": "so many"}]}


def fetcher(state: objects.Body, *, phase: str = "Running", name: str = "f") -> objects.Body:
    """The Job's pod: without probes it is ready as soon as it runs."""
    ready = kubelet.condition("Ready", str("running" in state), ago=5)
    container = {**kubelet.container(state), "name": "fetch"}
    reported_of = kubelet.status(container, conditions=(kubelet.condition("PodScheduled", "True"), ready))
    return objects.pod({**reported_of, "phase": phase}, name=name, of="job")


RUNNING = fetcher({"running": {"startedAt": kubelet.at(-20)}})


def ended(code: int, reason: str, name: str = "f") -> objects.Body:
    text = json.dumps({"reason": reason, "message": "the hub says no", "exitCode": code})
    return fetcher(kubelet.end(code, message=text), phase="Failed", name=name)


def serving(claim: str, path: str, **numbers: int) -> objects.Body:
    """The Deployment of the model in this claim."""
    found = objects.deployment(**numbers)
    pod = found["spec"]["template"]["spec"]
    pod["containers"][0]["args"] = ["serve", path]
    pod["volumes"] = [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}]
    return found


def compute(
    job: objects.Body | None,
    *download_pods: objects.Body,
    of: objects.Body | None = None,
    pods: tuple[objects.Body, ...] = (),
    old: status.Status | None = None,
    sample: Sample | None = None,
    job_error: str = "",
) -> status.Status:
    children: dict[Ref, Any] = {} if of is None else {Ref("Deployment", "m"): of}
    if job is not None:
        name = MODEL.download_name
        children[Ref("Job", name)] = {"kind": "Job", "metadata": {"name": name, "uid": "job"}, "status": job}
    observed = Observed(
        body=BODY | {"status": old or {}},
        children=children,
        replica_sets=(objects.replica_set("rs2", 2),),
        pods=pods,
        download_pods=download_pods,
        samples={"uid-f": sample} if sample else {},
        job_error=job_error,
    )
    return status.compute_status(MODEL, observed, now=datetime.now(UTC))


def test_a_download_job_reports_its_progress_and_rate() -> None:
    found = compute({}, RUNNING, sample=SAMPLE)
    assert found["phase"] == "Downloading"
    assert found["loadingReplicas"] == 0, "it is no replica"
    assert objects.condition(found, "ModelCached") == ("False", "Downloading")
    assert objects.condition(found, "Ready") == ("False", "Downloading")
    assert objects.condition(found, "Reconciling")[0] == "True"
    assert found["model"] == {"bytesTotal": 16, "bytesLoaded": 4, "etaSeconds": 3, "bytesPerSecond": 4}


def test_before_the_job_exists_the_status_is_pending_and_not_degraded() -> None:
    found = compute(None)
    assert found["phase"] == "Pending"
    assert objects.condition(found, "ModelCached") == ("False", "Pending")
    assert objects.condition(found, "Degraded")[0] == "False"


def test_digest_revision_and_files_of_a_download_stay_in_the_status() -> None:
    (first,) = kubelet.fetched()["initContainerStatuses"]
    brought = fetcher(first["state"], phase="Succeeded")
    found = compute(COMPLETE, brought)
    assert objects.condition(found, "ModelCached") == ("True", "Cached")
    assert found["model"]["digest"] == f"sha256:{'a' * 64}"
    assert found["model"]["resolvedRevision"].startswith("c0ffee")
    later = compute(COMPLETE, old=found)
    assert later["model"]["files"] == found["model"]["files"] == [{"name": "config.json", "sha256": "b" * 64}]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (77, "ModelAccessDenied"),
        (66, "ModelNotFound"),
        (73, "OutOfDisk"),
        (65, "ModelCorrupt"),
        (2, "ConfigError"),
    ],
)
def test_a_failed_job_is_stalled_with_its_cause_and_one_event(code: int, reason: str) -> None:
    found = compute(failed(), ended(code, reason))
    for kind, value in (
        ("ModelCached", "False"),
        ("Ready", "False"),
        ("Stalled", "True"),
        ("Degraded", "True"),
    ):
        assert objects.condition(found, kind) == (value, reason)
    assert found["phase"] == "Failed"
    failure = found["lastFailure"]
    assert (failure["container"], failure["exitCode"]) == ("fetch", code)
    assert "the hub says no" in failure["message"]
    assert [event.reason for event in transitions.events({}, found)] == [reason]


@pytest.mark.parametrize("code", [137, 143, 1])
def test_a_killed_download_pod_is_a_failed_download_and_no_engine_crash(code: int) -> None:
    found = compute({"failed": 1}, fetcher(kubelet.end(code), phase="Failed"))
    assert objects.condition(found, "ModelCached") == ("False", "ModelDownloadFailed")
    out = compute({"failed": 1}, fetcher(kubelet.end(137, "OOMKilled"), phase="Failed"))
    assert objects.condition(out, "ModelCached") == ("False", "ModelDownloadFailed")
    assert "OOMKilled" in out["lastFailure"]["message"]


def test_a_network_failure_is_degraded_until_the_retry_downloads_and_never_stalled() -> None:
    found = compute({"failed": 1}, ended(69, "ModelDownloadFailed"))
    assert objects.condition(found, "ModelCached") == ("False", "ModelDownloadFailed")
    assert objects.condition(found, "Stalled")[0] == "False"
    before = ended(69, "ModelDownloadFailed", name="before")
    asks = compute({"failed": 1}, before, RUNNING, sample=Sample(phase="resolving"))
    assert objects.condition(asks, "Degraded") == ("True", "ModelDownloadFailed")
    again = compute({"failed": 1}, before, RUNNING, sample=SAMPLE)
    assert objects.condition(again, "Degraded")[0] == "False"


def test_a_download_timeout_names_the_field_that_sets_it() -> None:
    found = compute(failed("DeadlineExceeded"))
    message = next(c["message"] for c in found["conditions"] if c["type"] == "ModelCached")
    assert objects.condition(found, "ModelCached") == ("False", "ModelDownloadFailed")
    assert "spec.cache.download.timeoutSeconds, 7200 s" in message


def test_a_retry_changes_no_condition_until_it_begins_to_download() -> None:
    refused = compute(failed(), ended(77, "ModelAccessDenied"))
    again = compute({}, RUNNING, old=refused, sample=Sample(phase="resolving"))
    assert {c["type"]: c for c in again["conditions"]} == {c["type"]: c for c in refused["conditions"]}
    assert transitions.events(refused, again) == ()
    helped = compute({}, RUNNING, old=again, sample=SAMPLE)
    assert objects.condition(helped, "Stalled")[0] == "False"


def test_while_another_model_downloads_the_old_one_stays_available() -> None:
    old = serving("other", "/models/model-other", ready=1)
    found = compute({}, RUNNING, of=old, sample=SAMPLE)
    assert found["phase"] == "Updating"
    assert objects.condition(found, "Ready") == ("False", "Downloading")
    assert objects.condition(found, "RolloutComplete")[0] == "False"
    assert objects.condition(found, "Available")[0] == "True"


def test_a_corrupt_file_is_reported_and_not_stalled_while_it_is_downloaded_again() -> None:
    own = serving(MODEL.claim_name, names.model_path(MODEL.model_dir))
    pod = objects.pod(kubelet.terminated(65, "ModelCorrupt", restarts=3))
    found = compute({}, RUNNING, of=own, pods=(pod,), sample=Sample(phase="verifying", total_bytes=9))
    assert objects.condition(found, "Ready") == ("False", "ModelCorrupt")
    assert objects.condition(found, "Stalled")[0] == "False"
    assert objects.condition(found, "ModelCached") == ("False", "Verifying")
    observed = Observed(body=BODY, pods=(pod,))
    assert set(status.pods_with_corrupt_model(observed, datetime.now(UTC))) == {"m-0"}
    healed = Observed(body=BODY, pods=(objects.pod(kubelet.ready()),))
    assert status.pods_with_corrupt_model(healed, datetime.now(UTC)) == {}


def test_a_quota_that_rejects_the_jobs_pod_is_in_the_conditions_and_in_one_event() -> None:
    def refused(pod: str) -> status.Status:
        words = (
            f'Error creating: pods "{pod}" is forbidden: exceeded quota: q, requested: cpu=1, limited: cpu=0'
        )
        return compute({}, job_error=words)

    first, second = refused("m-download-abcde"), refused("m-download-fghij")
    for kind in ("ModelCached", "Ready"):
        found = next(c for c in first["conditions"] if c["type"] == kind)
        assert (found["status"], found["reason"]) == ("False", "QuotaExceeded")
        assert "exceeded quota: q, requested: cpu=1" in found["message"]
    assert first["phase"] == "Pending"
    assert [event.reason for event in transitions.events({}, first)] == ["QuotaExceeded"]
    assert transitions.events(first, second) == () and first["conditions"] == second["conditions"]

    later = compute({}, RUNNING, old=first, sample=SAMPLE, job_error="what was said before")
    assert next(c["reason"] for c in later["conditions"] if c["type"] == "ModelCached") == "Downloading"


def test_an_admission_policy_that_rejects_the_jobs_pod_is_in_the_conditions() -> None:
    found = compute({}, job_error='Error creating: pods "x" is forbidden: violates PodSecurity')
    reported_of = next(c for c in found["conditions"] if c["type"] == "ModelCached")
    assert (reported_of["reason"], "violates PodSecurity" in reported_of["message"]) == (
        "ApplyRejected",
        True,
    )
