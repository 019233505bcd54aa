"""With Kubernetes' own controllers and scheduler a rollout completes with as many GPUs as replicas, and where
a quota allows no pod more, and rolls back where the new spec cannot work. A replica that finds no GPU is
reported while another serves.

Only the kubelet is simulated: a pod with a node is ready at once, and a terminating pod is deleted a moment
later, so that the scheduler alone decides which pod gets a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.api.client import Client, RefusedError
from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers, pods, rights
from e2e.operator.nodes import GPU, make_claim, make_node
from e2e.operator.process import OperatorProcess
from e2e.operator.world import OPERATOR_NAMESPACE, PATHS, Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(240)]

GONE_AFTER_SECONDS = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """Of its own: these controllers would act on the objects of other tests."""
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="module")
def world(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("scarce")
    with (
        Client(server.kubeconfig) as client,
        controllers.running(
            server,
            "deployment-controller",
            "replicaset-controller",
            "disruption-controller",
            "resourcequota-controller",
        ),
        controllers.scheduling(server),
    ):
        client.install_crd()
        world = World(client, directory / "no-audit")
        world.namespace(OPERATOR_NAMESPACE)
        rights.install(world, rights.rendered_chart())
        account = rights.token_kubeconfig(server, world, "quire-operator", directory / "kubeconfig")
        operator = OperatorProcess("scarce", account, directory).start()
        try:
            operator.wait_leading(world)
            yield world
        finally:
            operator.stop()


class Kubelet:
    """Simulates the kubelet in a namespace, and records the minimum number of ready pods."""

    def __init__(self, world: World, namespace: str) -> None:
        self._world, self._namespace = world, namespace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._going: dict[str, float] = {}
        self.ready: list[int] = []

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._stop.wait(0.05):
            found = self._world.find("Pod", self._namespace)
            for pod in found:
                try:
                    self._tend(pod)
                except RefusedError as error:
                    assert "not found" in str(error) or "modified" in str(error), error
            self.ready.append(sum(is_ready(pod) for pod in found))

    def _tend(self, pod: Body) -> None:
        name = pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"]:
            if time.monotonic() - self._going.setdefault(name, time.monotonic()) > GONE_AFTER_SECONDS:
                self._world.delete("Pod", self._namespace, name)
        elif pod["spec"].get("nodeName") and not pod["status"].get("containerStatuses"):
            works = "/models/nowhere" not in pod["spec"]["containers"][0].get("args", [])
            reported = pods.ready() if works else pods.terminated(66, "ModelNotFound", restarts=1)
            self._world.patch("Pod", self._namespace, name, {"status": reported}, status=True)


def is_ready(pod: Body) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    placed = "deletionTimestamp" not in pod["metadata"]
    return placed and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@pytest.fixture(scope="module", autouse=True)
def node(world: World) -> None:
    make_node(world, gpus=2)


def serving(world: World, namespace: str, replicas: int) -> set[str]:
    """The uids of the pods, once all wanted pods serve; empty before."""
    status = world.status(namespace, "m")
    found = world.find("Pod", namespace, "serving.quire.dev/name=m")
    is_done = world.condition(namespace, "m", "Ready")["status"] == "True" and all(map(is_ready, found))
    uids = {str(pod["metadata"]["uid"]) for pod in found}
    return uids if is_done and len(uids) == status.get("readyReplicas") == replicas else set()


@pytest.mark.deep
@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rollout_with_as_many_gpus_as_replicas_completes_with_at_most_one_replica_unavailable(
    world: World, namespace: str, replicas: int, tmp_path: Path
) -> None:
    make_claim(world, namespace)
    taken = None if replicas == 2 else take_one(world, namespace)
    resources: Body = {"cpu": "1", "memory": "2Gi", "gpu": {"resourceName": GPU}}
    with Kubelet(world, namespace) as kubelet:
        fields: dict[str, Any] = {"resources": resources, "rollout": {"surgeWaitSeconds": 10}}
        world.deploy(namespace, "m", replicas=replicas, **fields)
        before = eventually("it serves", lambda: serving(world, namespace, replicas))
        kubelet.ready.clear()

        world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxNumSeqs": 4}}})
        world.wait_condition(namespace, "m", "RolloutComplete", "False", "WaitingToSurge")
        eventually(
            "all pods are new",
            lambda: (now := serving(world, namespace, replicas)) and now.isdisjoint(before),
        )
        worst = min(kubelet.ready)

    assert worst >= replicas - 1 + (taken is not None)
    world.wait_events(namespace, "m", "Ready", "Ready", "SurgeUnschedulable")
    eventually(
        "the next one surges",
        lambda: (
            world.read("Deployment", namespace, "m")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 1
        ),
    )
    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": True}})
    free(world, namespace)


@pytest.mark.deep
def test_a_rollout_whose_surge_pod_a_quota_refuses_names_the_quota_and_completes_in_place(
    world: World, namespace: str
) -> None:
    make_claim(world, namespace)
    allow_pods(world, namespace, 2)
    with Kubelet(world, namespace) as kubelet:
        world.deploy(namespace, "m", replicas=2, rollout={"surgeWaitSeconds": 10})
        before = eventually("it serves", lambda: serving(world, namespace, 2))
        kubelet.ready.clear()

        edited = world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxNumSeqs": 4}}})
        begun = time.monotonic()
        complete = world.wait_condition(namespace, "m", "RolloutComplete", "False", "WaitingToSurge")
        assert "exceeded quota: pods" in complete["message"], "the quota is what refuses the surge pod"
        assert time.monotonic() - begun < 10, "it was named only once the wait was over"
        scheduled = world.condition(namespace, "m", "Scheduled")
        assert scheduled["reason"] == "QuotaExceeded" and "Have the quota raised" in scheduled["message"]
        eventually(
            "all pods are new",
            lambda: (now := serving(world, namespace, 2)) and now.isdisjoint(before),
        )
        worst = min(kubelet.ready)

    assert worst >= 1
    world.wait_events(namespace, "m", "Ready", "Ready", "SurgeUnschedulable")
    copied = {
        each["metadata"]["annotations"].get("serving.quire.dev/refused-beside")
        for each in world.history("ReplicaSet", namespace, edited)
    }
    assert "2" in copied, "the Deployment controller did not copy what makes the ReplicaSet's try again"


@pytest.mark.deep
def test_a_failing_spec_is_rolled_back_without_replacing_the_pods_that_serve(
    world: World, namespace: str
) -> None:
    make_claim(world, namespace)
    with Kubelet(world, namespace) as kubelet:
        world.deploy(namespace, "m", replicas=2, rollout={"autoRollback": True})
        before = eventually("it serves", lambda: serving(world, namespace, 2))
        good = world.status(namespace, "m")["renderRevision"]
        kubelet.ready.clear()

        world.patch("LLMDeployment", namespace, "m", model_at("nowhere"))
        ready = world.wait_condition(namespace, "m", "Ready", "False", "RolledBack")
        assert "ModelNotFound" in ready["message"]
        eventually("the new pod is gone", lambda: uids(world, namespace) == before)
        eventually("reported", lambda: world.status(namespace, "m")["renderRevision"] == good)
        assert world.condition(namespace, "m", "Available")["status"] == "True"
        reasons = eventually("the Event", lambda: reasons_with(world, namespace, "RolledBack"))
        # The failure is reported first where it is seen before the Deployment's status is.
        assert reasons.count("ModelNotFound") <= 1
        assert sorted(reason for reason in reasons if reason != "ModelNotFound") == ["Ready", "RolledBack"]

        world.patch("LLMDeployment", namespace, "m", model_at("somewhere"))
        after = eventually("the next edit", lambda: serving(world, namespace, 2))
        assert before.isdisjoint(after)
        assert min(kubelet.ready) >= 2


def test_a_replica_without_a_gpu_is_told_within_15_seconds_and_blocks_no_drain(
    world: World, server: ApiServer, namespace: str
) -> None:
    make_claim(world, namespace)
    take_one(world, namespace)
    resources: Body = {"cpu": "1", "memory": "2Gi", "gpu": {"resourceName": GPU}}
    with Kubelet(world, namespace):
        world.deploy(namespace, "m", replicas=1, resources=resources)
        served = eventually("it serves", lambda: serving(world, namespace, 1))

        world.patch("LLMDeployment", namespace, "m", {"spec": {"replicas": 2}})
        begun = time.monotonic()
        scheduled = world.wait_condition(namespace, "m", "Scheduled", "False", "WaitingForGPU")
        eventually("the Event", lambda: reasons_with(world, namespace, "WaitingForGPU"))
        assert time.monotonic() - begun < 15
        (waiting,) = uids(world, namespace) - served
        assert f"Pod {name_of(world, namespace, waiting)} has no node." in scheduled["message"]
        assert f"all {GPU} are in use" in scheduled["message"]
        assert scheduled["message"] in world.condition(namespace, "m", "Reconciling")["message"]
        assert world.condition(namespace, "m", "Reconciling")["status"] == "True"
        assert world.condition(namespace, "m", "Ready")["status"] == "True", "the other one serves"
        shown = quire(server, "status", "m", "-n", namespace)
        assert shown.returncode == 3 and "has no node" in " ".join(shown.stdout.split())
        assert "1 of 2 ready" in shown.stdout

        (uid,) = served
        eventually("a drain may go on", lambda: evicted(world, namespace, name_of(world, namespace, uid)))
    world.patch("LLMDeployment", namespace, "m", {"spec": {"suspend": True}})
    free(world, namespace)


def test_where_no_node_has_the_accelerator_the_status_says_so(world: World, namespace: str) -> None:
    make_claim(world, namespace)
    resources: Body = {"cpu": "1", "memory": "2Gi", "gpu": {"resourceName": "amd.com/gpu"}}
    world.deploy(namespace, "m", resources=resources)

    scheduled = world.wait_condition(namespace, "m", "Scheduled", "False", "WaitingForGPU")

    assert "no node that may take the pod has amd.com/gpu" in scheduled["message"]
    assert "in use" not in scheduled["message"]


def quire(server: ApiServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kubectl quire`, with an administrator's kubeconfig."""
    path = f"{Path(sys.executable).parent}:{server.bin_dir}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(server.kubeconfig)}
    command = ["kubectl", "quire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def name_of(world: World, namespace: str, uid: str) -> str:
    (name,) = [p["metadata"]["name"] for p in world.find("Pod", namespace) if p["metadata"]["uid"] == uid]
    return str(name)


def evicted(world: World, namespace: str, name: str) -> bool:
    """Whether the eviction API, which a drain uses, lets the pod go."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    try:
        world.client.request("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", eviction)
    except RefusedError as error:
        assert "disruption budget" in str(error), error
        return False
    return True


def reasons_with(world: World, namespace: str, wanted: str) -> list[str] | None:
    """The reasons of all Events, once there is one with that reason."""
    reasons = [event["reason"] for event in world.events(namespace, "m")]
    return reasons if wanted in reasons else None


def model_at(path: str) -> Body:
    return {"spec": {"model": {"source": {"pvc": {"path": path}}}}}


def uids(world: World, namespace: str) -> set[str]:
    found = world.find("Pod", namespace, "serving.quire.dev/name=m")
    return {str(pod["metadata"]["uid"]) for pod in found}


def allow_pods(world: World, namespace: str, number: int) -> None:
    """A ResourceQuota for so many pods, in force."""
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quota: Body = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": str(number)}}}
    world.client.request("POST", quotas, quota)

    def is_in_force() -> bool:
        live = world.client.request("GET", f"{quotas}/pods")
        return "pods" in live.get("status", {}).get("used", {})

    eventually("the quota is in force", is_in_force)


def take_one(world: World, namespace: str) -> Body:
    """Another owner's pod on one of the two GPUs."""
    limits = {"resources": {"limits": {GPU: "1"}}}
    return world.create(
        "Pod",
        namespace,
        {"metadata": {"name": "other"}, "spec": {"containers": [{"name": "c", "image": "i", **limits}]}},
    )


def free(world: World, namespace: str) -> None:
    """No pod uses a GPU any more."""

    def is_free() -> bool:
        world.client.request("DELETE", PATHS["Pod"].format(namespace), {"gracePeriodSeconds": 0})
        return not world.find("Pod", namespace)

    eventually("the Deployment is suspended", lambda: world.status(namespace, "m")["phase"] == "Suspended")
    eventually("no pod", is_free)
