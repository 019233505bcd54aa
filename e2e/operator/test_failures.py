"""Each failure is in the status with its remedy, and recorded once as an Event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.statusz import statusz_server
from e2e.operator.world import World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

FAILURES: dict[str, Callable[[], dict[str, Any]]] = {
    "ModelNotFound": lambda: pods.terminated(66, "ModelNotFound"),
    "ModelCorrupt": lambda: pods.terminated(65, "ModelCorrupt"),
    "ModelAccessDenied": lambda: pods.fetch_failed(77, "ModelAccessDenied", "the hub says no"),
    "ModelDownloadFailed": lambda: pods.fetch_failed(69, "ModelDownloadFailed", "no connection"),
    "OutOfDisk": lambda: pods.fetch_failed(73, "OutOfDisk", "5 bytes are missing"),
    "ConfigError": lambda: pods.terminated(2, "ConfigError"),
    "StartupTimeout": lambda: pods.terminated(74, "StartupTimeout"),
    "LoadStalled": lambda: pods.terminated(75, "LoadStalled"),
    "OOMKilled": pods.killed_for_memory,
    "GPUOutOfMemory": lambda: pods.terminated(76, "GPUOutOfMemory"),
    "EngineCrashed": lambda: pods.terminated(70, "EngineCrashed"),
    "EngineStalled": lambda: pods.terminated(71, "EngineStalled"),
    "ProcessStalled": lambda: pods.terminated(72, "ProcessStalled"),
    "CanaryMismatch": lambda: pods.terminated(78, "CanaryMismatch"),
    "MixedRevision": lambda: pods.terminated(79, "MixedRevision"),
    "ServerExited": pods.ended_well,
    "ImagePullFailed": lambda: pods.waiting("ErrImagePull", "not found"),
    "WaitingForNode": lambda: pods.unschedulable("0/3 nodes are available: 3 Insufficient memory."),
    "VolumePending": lambda: pods.unschedulable('persistentvolumeclaim "models" not found'),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failing_pod_is_reported_in_the_status_and_in_one_event(
    world: World, namespace: str, reason: str
) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", FAILURES[reason]())
    world.roll_out(namespace, "m", ready=0, replicas=1)

    ready = world.wait_condition(namespace, "m", "Ready", "False", reason)
    world.wait_condition(namespace, "m", "Degraded", "True", reason)

    failure = world.status(namespace, "m")["lastFailure"]
    assert (failure["reason"], failure["pod"]) == (reason, pod["metadata"]["name"])
    assert failure["message"] == ready["message"]
    assert len(failure["message"].split(". ")) >= 2, "it says what happened and what to do"
    (event,) = world.wait_events(namespace, "m", reason)
    assert event["type"] == "Warning"


def test_a_volume_that_does_not_mount_is_volume_pending(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", pods.not_mounted())
    metadata = pod["metadata"]
    event = {
        "metadata": {"name": "m.mount", "namespace": namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "kubelet",
        "reportingInstance": "node-1",
        "action": "Mount",
        "type": "Warning",
        "reason": "FailedMount",
        "note": 'MountVolume.SetUp failed for volume "keys": secret "keys" not found',
        "regarding": {
            "kind": "Pod",
            "namespace": namespace,
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
    world.client.request("POST", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event)

    ready = world.wait_condition(namespace, "m", "Ready", "False", "VolumePending")

    assert 'secret "keys" not found' in ready["message"]


def test_a_repeated_permanent_failure_is_stalled_until_the_pod_is_deleted(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", pods.terminated(66, "ModelNotFound"))
    world.wait_condition(namespace, "m", "Degraded", "True", "ModelNotFound")
    assert world.condition(namespace, "m", "Stalled")["status"] == "False"

    again = {"status": pods.terminated(66, "ModelNotFound", restarts=1)}
    world.patch("Pod", namespace, pod["metadata"]["name"], again, status=True)
    world.wait_condition(namespace, "m", "Stalled", "True", "ModelNotFound")
    world.wait_events(namespace, "m", "ModelNotFound")

    world.delete("Pod", namespace, pod["metadata"]["name"])
    world.wait_condition(namespace, "m", "Stalled", "False")


def test_ready_follows_the_rollout_and_is_reported_once(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", pods.loading())
    world.roll_out(namespace, "m", ready=0, replicas=1)
    world.wait_condition(namespace, "m", "Ready", "False", "Loading")
    assert world.status(namespace, "m")["phase"] == "Loading"

    world.patch("Pod", namespace, pod["metadata"]["name"], {"status": pods.ready()}, status=True)
    world.roll_out(namespace, "m", ready=1)
    world.wait_condition(namespace, "m", "Ready", "True")
    status = world.status(namespace, "m")
    assert (status["phase"], status["readyReplicas"], status["url"]) == (
        "Serving",
        1,
        f"http://m.{namespace}.svc/v1",
    )
    (event,) = world.wait_events(namespace, "m", "Ready")
    assert event["type"] == "Normal"

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxModelLen": 4096}}})
    world.wait_condition(namespace, "m", "Ready", "False", "RollingOut")
    assert world.condition(namespace, "m", "Available")["status"] == "True"
    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": True}})
    world.wait_condition(namespace, "m", "Ready", "False", "Suspended")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("CanaryMismatch", "corrupt"),
        ("CanaryStale", "nor completed the canary"),
        ("EngineStalled", "made no step"),
    ],
)
def test_an_unready_pod_is_reported_with_the_reason_that_it_gives(
    world: World, namespace: str, reason: str, words: str
) -> None:
    with statusz_server({"phase": "serving", "reason": reason}) as pod:
        world.deploy(namespace, "m")
        world.make_pod(namespace, "m", pods.loading(ip=pod.ip))

        ready = world.wait_condition(namespace, "m", "Ready", "False", reason)
        (event,) = world.wait_events(namespace, "m", reason)

    assert words in ready["message"]
    assert world.status(namespace, "m")["lastFailure"]["reason"] == reason
    assert event["type"] == "Warning"


def test_load_progress_and_the_measured_load_time_are_in_the_status(world: World, namespace: str) -> None:
    answer = {"phase": "loading", "loadedBytes": 1, "totalBytes": 100, "etaSeconds": 9.5}
    with statusz_server(answer) as speaker:
        world.deploy(namespace, "m")
        pod = world.make_pod(namespace, "m", pods.loading(ip=speaker.ip))
        eventually("progress", lambda: world.status(namespace, "m").get("model", {}).get("bytesLoaded") == 1)
        written = world.writes()[f"patch llmdeployments/status {namespace}/m"]
        for loaded in (2, 3):
            asked = speaker.asked
            speaker.answer |= {"loadedBytes": loaded}
            eventually("the next question", lambda asked=asked: speaker.asked > asked)  # type: ignore[misc]  # mypy infers no lambda that has a default
        assert world.writes()[f"patch llmdeployments/status {namespace}/m"] - written <= 1

        speaker.answer |= {"phase": "serving", "loadedBytes": 100, "loadSeconds": 12.7, "version": "0.1.0"}
        ready = pods.ready() | {"podIP": speaker.ip, "podIPs": [{"ip": speaker.ip}]}
        world.patch("Pod", namespace, pod["metadata"]["name"], {"status": ready}, status=True)
        world.roll_out(namespace, "m", ready=1)
        eventually("the load time", lambda: "lastLoadSeconds" in world.status(namespace, "m")["model"])

    status = world.status(namespace, "m")
    assert status["model"] == {"bytesTotal": 100, "bytesLoaded": 100, "lastLoadSeconds": 12}
    assert status["engine"]["version"] == "0.1.0"


def test_invalid_reports_of_a_model_server_are_dropped_or_bounded(world: World, namespace: str) -> None:
    lies = {
        "phase": "loading",
        "reason": "OwnershipConflict",
        "loadedBytes": 10**30,
        "totalBytes": 50,
        "etaSeconds": -1,
        "version": "\x1b[31m" * 10,
    }
    with statusz_server(lies) as liar, statusz_server({"phase": "loading", "pad": "x" * 10**7}) as flood:
        for name, speaker in (("liar", liar), ("flood", flood)):
            world.deploy(namespace, name)
            world.make_pod(namespace, name, pods.loading(ip=speaker.ip))
        eventually("the liar was asked", lambda: "model" in world.status(namespace, "liar"))

        status = world.status(namespace, "liar")
        assert status["model"] == {"bytesTotal": 50, "bytesLoaded": 0}
        assert "version" not in status["engine"]
        assert world.condition(namespace, "liar", "Ready")["reason"] == "Loading"
        assert "model" not in world.status(namespace, "flood")
