"""A model that the pods download: progress, failures and result in the status."""

from __future__ import annotations

import json

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import BUDGET, CHILDREN, NAME_LABEL, Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

HUB: Body = {
    "model": {"source": {"huggingFace": {"repo": "org/tiny", "tokenSecretRef": {"name": "hub", "key": "t"}}}},
    "cache": {"mode": "PerReplica", "size": "1Gi"},
}


SHARED: Body = {**HUB, "cache": {"mode": "SharedPVC", "size": "1Gi"}}
OTHER_MODEL: Body = {"spec": {"model": {"source": {"huggingFace": {"repo": "org/other"}}}}}
DONE = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
REASONS = {
    77: "ModelAccessDenied",
    66: "ModelNotFound",
    73: "OutOfDisk",
    69: "ModelDownloadFailed",
}


def job_of(world: World, namespace: str, *, after: str = "") -> Body:
    """The download Job of `m`; a newer one than that with the uid `after`."""

    def found() -> Body | None:
        jobs = world.find("Job", namespace, f"{NAME_LABEL}=m")
        return next((job for job in jobs if job["metadata"]["uid"] != after), None)

    return eventually("the Job", found)


def test_pods_wait_for_the_download_job_and_mount_its_claim_read_only(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", **SHARED)
    job = job_of(world, namespace)
    (claim,) = world.find("PersistentVolumeClaim", namespace)
    assert claim["metadata"]["ownerReferences"][0]["name"] == "m"
    world.wait_condition(namespace, "m", "ModelCached", "False", "Pending")

    said = {"phase": "downloading", "loadedBytes": 4, "totalBytes": 16, "etaSeconds": 3, "bytesPerSecond": 4}
    with statusz_server(said) as fetcher:
        pod = world.make_fetcher(namespace, job, pods.only_fetching(fetcher.ip))
        world.wait_condition(namespace, "m", "Ready", "False", "Downloading")
        eventually(
            "the speed", lambda: world.status(namespace, "m").get("model", {}).get("bytesPerSecond") == 4
        )
    assert world.status(namespace, "m")["phase"] == "Downloading"
    assert world.get("Deployment", namespace, "m") is None

    result = {"status": pods.only_fetched(0, pods.fetch_result())}
    world.patch("Pod", namespace, pod["metadata"]["name"], result, status=True)
    world.end_job(namespace, job, ago=60)
    world.wait_condition(namespace, "m", "ModelCached", "True", "Cached")
    deployment = eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    (model,) = [volume["persistentVolumeClaim"] for volume in volumes if volume["name"] == "model"]
    assert model == {"claimName": claim["metadata"]["name"], "readOnly": True}
    assert world.status(namespace, "m")["model"]["digest"] == f"sha256:{'a' * 64}"

    # A file becomes corrupt: a pod detects it, and another Job repairs it.
    world.make_pod(namespace, "m", pods.terminated(65, "ModelCorrupt"))
    again = job_of(world, namespace, after=job["metadata"]["uid"])
    world.wait_condition(namespace, "m", "ModelCached", "False", "Pending")
    assert world.condition(namespace, "m", "Ready")["reason"] == "ModelCorrupt"
    world.end_job(namespace, again)
    world.wait_condition(namespace, "m", "ModelCached", "True", "Cached")
    assert world.read("Deployment", namespace, "m")["spec"] == deployment["spec"]


def test_a_rollback_returns_to_the_model_before_without_another_download(
    world: World, namespace: str
) -> None:
    """In place the last old pod is gone before the new one is Ready: nothing uses the old claim then."""
    rollout = {"autoRollback": True, "strategy": "InPlace"}
    world.deploy(namespace, "m", **SHARED, rollout=rollout)
    first = job_of(world, namespace)
    world.end_job(namespace, first)
    (good,) = world.find("PersistentVolumeClaim", namespace)
    old = world.make_pod(namespace, "m", pods.ready())
    world.roll_out(namespace, "m", ready=1, progressing=DONE)
    world.wait_condition(namespace, "m", "Ready", "True")

    world.patch(
        "LLMDeployment", namespace, "m", {"spec": {"model": {"source": {"huggingFace": {"repo": "org/b"}}}}}
    )
    world.end_job(namespace, job_of(world, namespace, after=first["metadata"]["uid"]))
    eventually("the new model is rolled out", lambda: claim_of_pods(world, namespace) != name_of(good))
    world.make_pod(namespace, "m", pods.terminated(66, "ModelNotFound", restarts=1), revision=2)
    for kind, gone in (("Pod", old), ("ReplicaSet", world.read("ReplicaSet", namespace, owner_of(old)))):
        world.delete(kind, namespace, name_of(gone))
    moving = {"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}
    world.roll_out(namespace, "m", ready=0, replicas=1, progressing=moving)

    world.wait_condition(namespace, "m", "Stalled", "True", "RolledBack")
    eventually("the model before", lambda: claim_of_pods(world, namespace) == name_of(good))
    claim = world.read("PersistentVolumeClaim", namespace, name_of(good))
    assert claim["metadata"]["uid"] == good["metadata"]["uid"], "the claim was deleted"
    job = world.read("Job", namespace, name_of(first))
    assert job["metadata"]["uid"] == first["metadata"]["uid"], "the model was downloaded again"


def test_the_claim_of_the_model_before_is_deleted_once_the_new_model_was_ready(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", **SHARED, rollout={"autoRollback": True})
    first = job_of(world, namespace)
    world.end_job(namespace, first)
    (old,) = world.find("PersistentVolumeClaim", namespace)
    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    world.roll_out(namespace, "m", ready=1, progressing=DONE)
    world.wait_condition(namespace, "m", "Ready", "True")
    world.patch(
        "LLMDeployment", namespace, "m", {"spec": {"model": {"source": {"huggingFace": {"repo": "org/b"}}}}}
    )
    world.end_job(namespace, job_of(world, namespace, after=first["metadata"]["uid"]))
    eventually("the new model is rolled out", lambda: claim_of_pods(world, namespace) != name_of(old))
    assert world.get("PersistentVolumeClaim", namespace, name_of(old)) is not None

    world.roll_out(namespace, "m", ready=1, progressing=DONE)

    def is_only_claim() -> bool:
        return old["metadata"]["uid"] not in {
            claim["metadata"]["uid"]
            for claim in world.find("PersistentVolumeClaim", namespace)
            if "deletionTimestamp" not in claim["metadata"]
        }

    eventually("the old claim is deleted", is_only_claim)
    eventually("its Job is deleted", lambda: world.get("Job", namespace, name_of(first)) is None)


def name_of(body: Body) -> str:
    return str(body["metadata"]["name"])


def owner_of(pod: Body) -> str:
    return str(pod["metadata"]["ownerReferences"][0]["name"])


def claim_of_pods(world: World, namespace: str) -> str:
    """The claim from which the Deployment's pods serve."""
    spec = world.read("Deployment", namespace, "m")["spec"]["template"]["spec"]
    (model,) = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if volume["name"] == "model"]
    return str(model["claimName"])


def test_a_quota_that_rejects_the_jobs_pod_is_reported_in_model_cached(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", **SHARED)
    metadata = job_of(world, namespace)["metadata"]
    event = {
        "metadata": {"name": "m.refused", "namespace": namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "job-controller",
        "reportingInstance": "control-plane",
        "action": "Create",
        "type": "Warning",
        "reason": "FailedCreate",
        "note": 'Error creating: pods "m-x" is forbidden: exceeded quota: q, requested: cpu=1, limited: 0',
        "regarding": {
            "kind": "Job",
            "namespace": namespace,
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
    world.client.request("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event)

    cached = eventually(
        "the quota is named",
        lambda: (
            found
            if (found := world.condition(namespace, "m", "ModelCached"))["reason"] == "QuotaExceeded"
            else None
        ),
    )

    assert "exceeded quota: q" in cached["message"]
    world.wait_events(namespace, "m", "QuotaExceeded")


@pytest.mark.parametrize("code", REASONS)
def test_a_failed_download_is_reported_in_one_event_and_restarted_by_an_edit(
    world: World, namespace: str, code: int
) -> None:
    world.deploy(namespace, "m", **SHARED)
    job, reason = job_of(world, namespace), REASONS[code]
    text = json.dumps({"reason": reason, "message": "the hub says no", "exitCode": code})
    world.make_fetcher(namespace, job, pods.only_fetched(code, text))
    is_final = reason != "ModelDownloadFailed"
    world.end_job(namespace, job, failed="PodFailurePolicy" if is_final else "BackoffLimitExceeded")
    world.wait_condition(namespace, "m", "ModelCached", "False", reason)
    world.wait_condition(namespace, "m", "Stalled", str(is_final))
    assert "the hub says no" in world.status(namespace, "m")["lastFailure"]["message"]
    world.wait_events(namespace, "m", reason)
    assert world.get("Deployment", namespace, "m") is None

    source = {"huggingFace": {"tokenSecretRef": {"name": "other"}}}
    world.patch("LLMDeployment", namespace, "m", {"spec": {"model": {"source": source}}})
    again = job_of(world, namespace, after=job["metadata"]["uid"])
    env = again["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e["valueFrom"]["secretKeyRef"]["name"] for e in env if "valueFrom" in e] == ["other"]


def test_a_retained_claim_survives_its_llmdeployment_and_is_adopted_by_the_next_one(
    world: World, namespace: str
) -> None:
    cache = {**SHARED["cache"], "retainPolicy": "Retain"}
    world.deploy(namespace, "m", **{**SHARED, "cache": cache})
    world.end_job(namespace, job_of(world, namespace))
    world.wait_condition(namespace, "m", "ModelCached", "True")
    (claim,) = world.find("PersistentVolumeClaim", namespace)
    assert "ownerReferences" not in claim["metadata"]
    world.delete("LLMDeployment", namespace, "m")
    for kind in (*CHILDREN, BUDGET, "Job", "ControllerRevision"):  # as the garbage collector would
        for body in world.find(kind, namespace, f"{NAME_LABEL}=m"):
            world.delete(kind, namespace, body["metadata"]["name"])
    world.deploy(namespace, "m", **SHARED)
    job_of(world, namespace)
    owned = eventually(
        "its new owner",
        lambda: world.find("PersistentVolumeClaim", namespace)[0]["metadata"].get("ownerReferences"),
    )
    assert owned[0]["name"] == "m"
    assert world.find("PersistentVolumeClaim", namespace)[0]["metadata"]["uid"] == claim["metadata"]["uid"]


def test_a_download_in_the_pod_reports_its_progress_its_failure_and_its_result(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", **HUB)
    said = {"phase": "downloading", "loadedBytes": 4, "totalBytes": 16, "etaSeconds": 3}
    with statusz_server(said) as fetcher:
        address = {"podIP": fetcher.ip, "podIPs": [{"ip": fetcher.ip}]}
        pod = world.make_pod(namespace, "m", pods.fetching() | address)
        name = pod["metadata"]["name"]
        world.wait_condition(namespace, "m", "Ready", "False", "Downloading")
        eventually(
            "the progress", lambda: world.status(namespace, "m").get("model", {}).get("bytesLoaded") == 4
        )
    status = world.status(namespace, "m")
    assert (status["phase"], status["model"]["bytesTotal"]) == ("Downloading", 16)

    denied = pods.fetch_failed(77, "ModelAccessDenied", "the hub says no", restarts=2)
    world.patch("Pod", namespace, name, {"status": denied}, status=True)
    world.wait_condition(namespace, "m", "Stalled", "True", "ModelAccessDenied")
    assert world.status(namespace, "m")["lastFailure"]["container"] == "fetch"

    world.patch("Pod", namespace, name, {"status": pods.fetched()}, status=True)
    world.wait_condition(namespace, "m", "Ready", "False", "Loading")
    found = world.status(namespace, "m")["model"]
    assert found["files"] == [{"name": "config.json", "sha256": "b" * 64}]
    assert found["digest"] == f"sha256:{'a' * 64}"
