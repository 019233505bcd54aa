"""Disruptions by Kubernetes' own controllers: a node that is reclaimed, unreachable or drained, preemption, a
queue without quota. Each is reported with its reason, and pods drain within their grace period.

Only the kubelet is simulated, and Kueue's webhook, which adds the scheduling gate.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.api import profiles
from e2e.api.client import Client, RefusedError
from e2e.cluster.apiserver import ApiServer
from e2e.operator import controllers, pods, rights
from e2e.operator.nodes import GPU, MERGE, make_claim, make_node
from e2e.operator.process import OperatorProcess
from e2e.operator.world import OPERATOR_NAMESPACE, Body, World
from e2e.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

NODE = "/api/v1/nodes/node-1"
DRAIN = {"preStopSeconds": 1, "timeoutSeconds": 30}
# The taint controller finds the pods of a node by an index that the other controller creates.
CONTROLLERS = ("taint-eviction-controller", "node-lifecycle-controller", "disruption-controller")
PATIENT = ("--node-monitor-grace-period=1h", "--node-startup-grace-period=1h")
SOON = ("--node-monitor-period=500ms", "--node-monitor-grace-period=2s", "--node-startup-grace-period=2s")


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """Of its own, because these controllers would act on the objects of other tests."""
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="module")
def world(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("disruptions")
    with (
        Client(server.kubeconfig) as client,
        controllers.running(server, *CONTROLLERS, flags=PATIENT),
        controllers.scheduling(server),
    ):
        client.install_crd()
        client.install_crd(profiles.CRD)
        client.create(profiles.profile(resourceName=GPU))
        world = World(client, directory / "no-audit")
        world.namespace(OPERATOR_NAMESPACE)
        rights.install(world, rights.rendered_chart())
        make_node(world, gpus=1)
        account = rights.token_kubeconfig(server, world, "quire-operator", directory / "kubeconfig")
        operator = OperatorProcess("disrupted", account, directory).start()
        try:
            operator.wait_leading(world)
            yield world
        finally:
            operator.stop()


@pytest.fixture
def serving(world: World, namespace: str) -> Iterator[Body]:
    """A serving pod on the only node, a spot node, with the only GPU."""
    make_claim(world, namespace)
    resources: Body = {"cpu": "1", "memory": "2Gi", "profileRef": {"name": "h100"}}
    world.deploy(namespace, "m", resources=resources, drain=DRAIN, scheduling={"spot": {"enabled": True}})
    name = world.make_pod(namespace, "m", {"phase": "Pending"})["metadata"]["name"]
    eventually("it is placed", lambda: world.read("Pod", namespace, name)["spec"].get("nodeName"))
    yield world.patch("Pod", namespace, name, {"status": ready()}, status=True)
    world.client.request("PATCH", NODE, {"spec": {"taints": None}}, MERGE)
    world.delete("LLMDeployment", namespace, "m")
    for pod in world.find("Pod", namespace):
        world.delete("Pod", namespace, pod["metadata"]["name"])


def ready() -> Body:
    return {
        **pods.ready(),
        "conditions": [pods.condition(kind, "True") for kind in ("Ready", "ContainersReady")],
    }


def is_terminating(world: World, pod: Body) -> bool:
    metadata = pod["metadata"]
    return "deletionTimestamp" in world.read("Pod", metadata["namespace"], metadata["name"])["metadata"]


def last_failure(world: World, namespace: str, reason: str) -> Body:
    def last() -> Body | None:
        failure: Body = world.status(namespace, "m").get("lastFailure", {})
        return failure if failure.get("reason") == reason else None

    failure = eventually(f"lastFailure {reason}", last)
    eventually("the Event", lambda: reason in [e["reason"] for e in world.events(namespace, "m")])
    assert [e["reason"] for e in world.events(namespace, "m")].count(reason) == 1
    return failure


def test_a_no_execute_taint_of_a_reclaimed_node_starts_the_drain_at_once(
    world: World, namespace: str, serving: Body
) -> None:
    taint = {"key": "cloud.google.com/impending-node-termination", "effect": "NoExecute"}
    world.client.request("PATCH", NODE, {"spec": {"taints": [taint]}}, MERGE)

    eventually("it drains", lambda: is_terminating(world, serving))

    pod = world.read("Pod", namespace, serving["metadata"]["name"])
    assert pod["metadata"]["deletionGracePeriodSeconds"] == 1 + 30 + 5, "streams have the time of a drain"
    failure = last_failure(world, namespace, "Evicted")
    assert failure["pod"] == serving["metadata"]["name"]


def test_an_eviction_by_the_eviction_api_is_reported(world: World, namespace: str, serving: Body) -> None:
    name = serving["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"

    def evicted() -> Body | None:
        try:
            return world.client.request("POST", path, eviction)
        except Exception as error:  # the budget's controller has not counted yet
            assert "disruption budget" in str(error)
            return None

    eventually("the budget allows it", evicted)

    assert "Eviction" in last_failure(world, namespace, "Evicted")["message"]


def test_a_preemption_by_a_pod_of_higher_priority_is_reported(
    world: World, namespace: str, serving: Body
) -> None:
    urgent = {"metadata": {"name": "urgent"}, "value": 1000}
    world.client.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", urgent)
    limits = {"cpu": "1", "memory": "1Gi", GPU: "1"}
    rival = {"name": "c", "image": "i", "resources": {"limits": limits}}
    spec = {"priorityClassName": "urgent", "containers": [rival]}

    def is_admitted() -> bool:
        try:
            world.create("Pod", namespace, {"metadata": {"name": "rival"}, "spec": spec})
        except RefusedError as error:  # admission has not seen the class yet
            assert "no PriorityClass" in str(error)
            return False
        return True

    eventually("the API server knows the class", is_admitted)

    assert last_failure(world, namespace, "Preempted")["pod"] == serving["metadata"]["name"]


def test_a_pod_without_gpu_waits_for_gpu_and_a_pod_without_quota_waits_for_quota(
    world: World, namespace: str, serving: Body
) -> None:
    held: Body = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    world.deploy(namespace, "queued", scheduling={"queueName": "team-a"})
    world.make_pod(namespace, "queued", {}, **held)
    world.make_pod(namespace, "m", {"phase": "Pending"}, revision=2)
    world.roll_out(namespace, "m", ready=0, replicas=2)

    world.wait_condition(namespace, "m", "Scheduled", "False", "WaitingForGPU")
    world.wait_condition(namespace, "queued", "Ready", "False", "WaitingForQuota")
    world.wait_event(namespace, "queued", "WaitingForQuota")
    labels = world.read("Deployment", namespace, "queued")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"


def test_an_unresponsive_node_is_reported_as_lost_before_its_pods_are_deleted(
    world: World, server: ApiServer, namespace: str, serving: Body
) -> None:
    with controllers.running(server, "node-lifecycle-controller", flags=SOON):
        failure = last_failure(world, namespace, "NodeLost")

    assert failure["pod"] == serving["metadata"]["name"]
    assert "node-1" in failure["message"]
    assert not is_terminating(world, serving), "reported long before the pod is deleted"
