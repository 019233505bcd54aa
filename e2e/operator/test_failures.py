"""Each way of failing is in the status, with what to do about it, and told once as an Event."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.world import World, eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

FAILURES: dict[str, Callable[[], dict[str, Any]]] = {
    "ModelNotFound": lambda: pods.terminated(66, "ModelNotFound"),
    "ModelCorrupt": lambda: pods.terminated(65, "ModelCorrupt"),
    "ConfigError": lambda: pods.terminated(2, "ConfigError"),
    "StartupTimeout": lambda: pods.terminated(74, "StartupTimeout"),
    "LoadStalled": lambda: pods.terminated(75, "LoadStalled"),
    "OOMKilled": pods.killed_for_memory,
    "EngineCrashed": lambda: pods.terminated(70, "EngineCrashed"),
    "EngineStalled": lambda: pods.terminated(71, "EngineStalled"),
    "ImagePullFailed": lambda: pods.waiting("ErrImagePull", "not found"),
    "WaitingForNode": lambda: pods.unschedulable("0/3 nodes are available: 3 Insufficient memory."),
    "VolumePending": lambda: pods.unschedulable('persistentvolumeclaim "models" not found'),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failing_pod_is_told_in_the_status_and_in_one_event(
    world: World, namespace: str, reason: str
) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", FAILURES[reason]())
    world.roll_out(namespace, "m", ready=0, replicas=1)

    ready = world.wait_condition(namespace, "m", "Ready", "False", reason)
    world.wait_condition(namespace, "m", "Degraded", "True", reason)
    eventually("the Event", lambda: world.events(namespace, "m"))

    failure = world.status(namespace, "m")["lastFailure"]
    assert (failure["reason"], failure["pod"]) == (reason, pod["metadata"]["name"])
    assert failure["message"] == ready["message"]
    assert len(failure["message"].split(". ")) >= 2, "it says what happened and what to do"
    assert [(e["reason"], e["type"]) for e in world.events(namespace, "m")] == [(reason, "Warning")]


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


def test_pods_that_a_quota_refuses_are_quota_exceeded(world: World, namespace: str) -> None:
    world.deploy(namespace, "m")
    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    refusal = 'pods "m-5d8f-x2x" is forbidden: exceeded quota: none-left, requested: pods=1, used: pods=0'
    failed = pods.condition("ReplicaFailure", "True", reason="FailedCreate", message=refusal)

    world.patch("Deployment", namespace, "m", {"status": {"conditions": [failed]}}, status=True)

    ready = world.wait_condition(namespace, "m", "Ready", "False", "QuotaExceeded")
    assert "none-left" in ready["message"] and "m-5d8f" not in ready["message"]
    assert world.condition(namespace, "m", "Stalled")["status"] == "False"


def test_a_child_that_a_quota_refuses_is_quota_exceeded_and_heals(world: World, namespace: str) -> None:
    quota = {"metadata": {"name": "no-maps"}, "spec": {"hard": {"count/configmaps": "0"}}}
    status = {"status": {"hard": {"count/configmaps": "0"}, "used": {"count/configmaps": "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    world.client.request("POST", path, quota)
    world.client.request("PATCH", f"{path}/no-maps/status", status, "application/merge-patch+json")

    world.deploy(namespace, "m")
    ready = world.wait_condition(namespace, "m", "Ready", "False", "QuotaExceeded")
    assert "no-maps" in ready["message"]

    world.client.request("DELETE", f"{path}/no-maps")
    eventually("all children", lambda: world.has_children(namespace, "m"), seconds=30)
    world.wait_condition(namespace, "m", "Degraded", "False")


def test_somebody_elses_object_is_left_alone_and_named_until_it_is_gone(world: World, namespace: str) -> None:
    theirs = {"metadata": {"name": "m"}, "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}}
    world.create("Service", namespace, theirs)

    world.deploy(namespace, "m")
    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "OwnershipConflict")

    assert "Service m" in stalled["message"]
    assert world.condition(namespace, "m", "Reconciling")["status"] == "False"
    assert world.read("Service", namespace, "m")["spec"]["selector"] == {"app": "theirs"}
    assert [e["reason"] for e in world.events(namespace, "m")] == ["OwnershipConflict"]

    world.delete("Service", namespace, "m")
    world.wait_condition(namespace, "m", "Stalled", "False")
    assert world.has_children(namespace, "m")


def test_a_spec_that_the_administrator_forbids_is_stalled_until_it_is_edited(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m", engine={"env": [{"name": "QUIRE_FAULT", "value": "crash_step"}]})

    stalled = world.wait_condition(namespace, "m", "Stalled", "True", "InvalidSpec")
    assert "spec.engine.env[0].name" in stalled["message"] and "allowFaults" in stalled["message"]
    assert world.get("Deployment", namespace, "m") is None
    assert world.status(namespace, "m")["observedGeneration"] == 1

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"env": None}}})
    world.wait_condition(namespace, "m", "Stalled", "False")
    assert world.status(namespace, "m")["observedGeneration"] == 2


def test_a_final_failure_twice_is_stalled_and_a_change_of_the_spec_clears_it(
    world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    pod = world.make_pod(namespace, "m", pods.terminated(66, "ModelNotFound"))
    world.wait_condition(namespace, "m", "Degraded", "True", "ModelNotFound")
    assert world.condition(namespace, "m", "Stalled")["status"] == "False"

    again = {"status": pods.terminated(66, "ModelNotFound", restarts=1)}
    world.patch("Pod", namespace, pod["metadata"]["name"], again, status=True)
    world.wait_condition(namespace, "m", "Stalled", "True", "ModelNotFound")
    assert len(world.events(namespace, "m")) == 1

    world.delete("Pod", namespace, pod["metadata"]["name"])
    world.wait_condition(namespace, "m", "Stalled", "False")


def test_ready_follows_the_rollout_and_is_told_once(world: World, namespace: str) -> None:
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
    assert [(e["reason"], e["type"]) for e in world.events(namespace, "m")] == [("Ready", "Normal")]

    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxModelLen": 4096}}})
    world.wait_condition(namespace, "m", "Ready", "False", "RollingOut")
    assert world.condition(namespace, "m", "Available")["status"] == "True"
    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": True}})
    world.wait_condition(namespace, "m", "Ready", "False", "Suspended")


def test_a_pod_that_is_alive_and_wrong_is_told_by_what_it_says(world: World, namespace: str) -> None:
    with statusz("127.0.0.31", {"phase": "serving", "reason": "CanaryMismatch"}):
        world.deploy(namespace, "m")
        world.make_pod(namespace, "m", pods.loading(ip="127.0.0.31"))

        ready = world.wait_condition(namespace, "m", "Ready", "False", "CanaryMismatch")

    assert "corrupt" in ready["message"]


def test_load_progress_and_the_measured_load_time_are_in_the_status(
    world: World, namespace: str, operator: OperatorProcess
) -> None:
    answer: dict[str, Any] = {"phase": "loading", "loadedBytes": 1, "totalBytes": 100, "etaSeconds": 9.5}
    with statusz("127.0.0.32", answer):
        world.deploy(namespace, "m")
        pod = world.make_pod(namespace, "m", pods.loading(ip="127.0.0.32"))
        eventually("progress", lambda: world.status(namespace, "m").get("model", {}).get("bytesLoaded") == 1)
        written = world.writes()[f"patch llmdeployments/status {namespace}/m"]
        for loaded in range(2, 8):
            answer["loadedBytes"] = loaded
            threading.Event().wait(1)
        assert world.writes()[f"patch llmdeployments/status {namespace}/m"] - written <= 1

        answer |= {"phase": "serving", "loadedBytes": 100, "loadSeconds": 12.7, "version": "0.1.0"}
        world.patch("Pod", namespace, pod["metadata"]["name"], {"status": pods.ready() | {
            "podIP": "127.0.0.32", "podIPs": [{"ip": "127.0.0.32"}]}}, status=True)  # fmt: skip
        world.roll_out(namespace, "m", ready=1)
        eventually("the load time", lambda: "lastLoadSeconds" in world.status(namespace, "m")["model"])

    status = world.status(namespace, "m")
    assert status["model"] == {"bytesTotal": 100, "bytesLoaded": 100, "lastLoadSeconds": 12}
    assert status["engine"]["version"] == "0.1.0"


def test_a_lying_engine_changes_nothing_but_what_is_its_own(world: World, namespace: str) -> None:
    lies = {
        "phase": "loading",
        "reason": "OwnershipConflict",
        "loadedBytes": 10**30,
        "totalBytes": 50,
        "etaSeconds": -1,
        "version": "\x1b[31m" * 10,
    }
    with statusz("127.0.0.33", lies), statusz("127.0.0.34", {"phase": "loading", "pad": "x" * 10**7}):
        for name, ip in (("liar", "127.0.0.33"), ("flood", "127.0.0.34")):
            world.deploy(namespace, name)
            world.make_pod(namespace, name, pods.loading(ip=ip))
        eventually("the liar was asked", lambda: "model" in world.status(namespace, "liar"))

        status = world.status(namespace, "liar")
        assert status["model"] == {"bytesTotal": 50, "bytesLoaded": 0}
        assert "version" not in status["engine"]
        assert world.condition(namespace, "liar", "Ready")["reason"] == "Loading"
        assert "model" not in world.status(namespace, "flood")


@contextmanager
def statusz(address: str, answer: dict[str, Any]) -> Iterator[None]:
    """A pod's health port on a loopback address; `answer` may be changed while it serves."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                return  # the client had read enough

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer((address, 8001), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
