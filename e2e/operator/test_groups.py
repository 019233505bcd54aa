"""Groups of pods that LeaderWorkerSet itself creates: what the operator relies on, and what it makes of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import groups, rights
from e2e.operator import pods as kubelet
from e2e.operator.audited import audited
from e2e.operator.process import OperatorProcess
from e2e.operator.world import Body, World
from e2e.waiting import eventually

pytestmark = pytest.mark.api

SET = "leaderworkerset.sigs.k8s.io"


@pytest.fixture(scope="module")
def audited_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, World]]:
    """An API server of their own: other tests have one without LeaderWorkerSet."""
    directory = tmp_path_factory.mktemp("lws")
    with audited() as (server, world), groups.running(server, world, directory):
        yield server, world


@pytest.fixture(scope="module")
def kubeconfig(audited_world: tuple[ApiServer, World], tmp_path_factory: pytest.TempPathFactory) -> Path:
    server, world = audited_world
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    return rights.token_kubeconfig(server, world, "quire-operator", path)


@pytest.fixture(scope="module")
def world(audited_world: tuple[ApiServer, World]) -> World:
    return audited_world[1]


@pytest.fixture(scope="module", autouse=True)
def half_placed(operator: OperatorProcess, world: World) -> str:
    """The namespace of a group of which one pod has no node. It begins before the first test, because two
    minutes pass until the status says it.
    """
    namespace = world.namespace("half-placed")
    pods = deploy(world, namespace)
    groups.bind(world, namespace, pods["m-0"])
    groups.settle(world, namespace, pods["m-0"], ready=False)
    lacking = {**kubelet.unschedulable("0/2 nodes are available: 2 Insufficient cpu.")}
    world.patch("Pod", namespace, "m-0-1", {"status": lacking}, status=True)
    return namespace


def a_set(name: str) -> Body:
    """Two pods a group, as the operator asks for them."""
    container = {"name": "server", "image": "example.test/server:1"}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "leaderWorkerTemplate": {
                "size": 2,
                "restartPolicy": "RecreateGroupAfterStart",
                "leaderTemplate": template,
                "workerTemplate": template,
            },
        },
    }


def test_a_group_has_its_identity_and_its_leaders_address_in_its_pods(world: World, namespace: str) -> None:
    world.create("LeaderWorkerSet", namespace, a_set("m"))
    pods = groups.wait_group_pods(world, namespace, "m", 2)
    leader, worker = pods["m-0"], pods["m-0-1"]
    labels = [pod["metadata"]["labels"] for pod in (leader, worker)]
    assert [one[f"{SET}/worker-index"] for one in labels] == ["0", "1"]
    assert labels[0][f"{SET}/group-key"] == labels[1][f"{SET}/group-key"]
    first = {pod["metadata"]["name"]: pod["spec"]["containers"][0]["env"] for pod in pods.values()}
    for env in first.values():
        given = {item["name"]: item.get("value") for item in env}
        assert given["LWS_LEADER_ADDRESS"] == f"m-0.m-0.{namespace}"
        assert given["LWS_GROUP_SIZE"] == "2"


def test_a_restarted_container_of_a_worker_replaces_the_whole_group(world: World, namespace: str) -> None:
    world.create("LeaderWorkerSet", namespace, a_set("m"))
    before = groups.wait_group_pods(world, namespace, "m", 2)
    for pod in before.values():
        groups.settle(world, namespace, pod)
    uids = {pod["metadata"]["uid"] for pod in before.values()}
    groups.settle(world, namespace, before["m-0-1"], restarts=1)

    def replaced() -> bool:
        now = groups.group_pods(world, namespace, "m")
        kept = [pod for pod in now.values() if pod["metadata"]["uid"] in uids]
        return len(now) == 2 and not kept

    eventually("another group", replaced)


def deploy(world: World, namespace: str, **spec: Any) -> dict[str, Body]:
    """An LLMDeployment on two nodes, and the pods of its first group."""
    world.deploy(namespace, "m", parallelism={"tensor": 2, "nodes": 2}, **spec)
    return groups.wait_group_pods(world, namespace, "m", 2)


def settle_all(world: World, namespace: str, pods: dict[str, Body], **reported: Any) -> None:
    for pod in pods.values():
        groups.settle(world, namespace, pod, **reported)


def uids(pods: dict[str, Body]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def wait_other_pods(world: World, namespace: str, before: dict[str, Body], count: int = 2) -> dict[str, Body]:
    def others() -> dict[str, Body] | None:
        found = groups.group_pods(world, namespace, "m")
        return found if len(found) == count and not uids(found) & uids(before) else None

    return eventually("pods of another group", others)


def wait_in_status(world: World, namespace: str, leader: Body) -> None:
    """Waits until the status is about the group of this leader."""
    eventually(
        "the group in the status",
        lambda: world.status(namespace, "m")["groups"][0]["leader"] == leader["metadata"]["uid"],
    )


def test_what_serves_stays_until_its_successor_serves_from_one_node_to_two_and_back(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    world.deploy(namespace, "m")
    eventually("the Deployment", lambda: world.get("Deployment", namespace, "m"))
    old = world.make_pod(namespace, "m", kubelet.ready())
    world.roll_out(namespace, "m", ready=1)
    world.wait_condition(namespace, "m", "Ready", "True")

    two = {"spec": {"parallelism": {"tensor": 2, "nodes": 2}}}
    world.patch("LLMDeployment", namespace, "m", two)
    pods = groups.wait_group_pods(world, namespace, "m", 2)
    groups.settle(world, namespace, pods["m-0"])
    world.wait_condition(namespace, "m", "RolloutComplete", "False")
    wait_in_status(world, namespace, pods["m-0"])
    assert world.get("Deployment", namespace, "m") is not None
    assert world.condition(namespace, "m", "Available")["status"] == "True"
    groups.settle(world, namespace, pods["m-0-1"])
    eventually("the Deployment is gone", lambda: world.get("Deployment", namespace, "m") is None)
    eventually("its pod is gone", lambda: world.get("Pod", namespace, old["metadata"]["name"]) is None)
    world.wait_condition(namespace, "m", "RolloutComplete", "True")

    world.patch("LLMDeployment", namespace, "m", {"spec": {"parallelism": None}})
    eventually("another Deployment", lambda: world.get("Deployment", namespace, "m"))
    world.make_pod(namespace, "m", kubelet.loading())
    world.wait_condition(namespace, "m", "RolloutComplete", "False")
    assert world.get("LeaderWorkerSet", namespace, "m") is not None
    world.roll_out(namespace, "m", ready=1)
    eventually("the groups are gone", lambda: world.get("LeaderWorkerSet", namespace, "m") is None)


def test_an_llm_deployment_on_two_nodes_is_ready_with_all_pods_and_then_nothing_is_written(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    pods = deploy(world, namespace)
    groups.settle(world, namespace, pods["m-0"])
    world.wait_condition(namespace, "m", "Ready", "False")
    groups.settle(world, namespace, pods["m-0-1"])
    world.wait_condition(namespace, "m", "Ready", "True", "AllReplicasReady")

    (group,) = world.status(namespace, "m")["groups"]
    assert (group["phase"], group["readyPods"]) == ("Serving", 2)
    world.wait_condition(namespace, "m", "RanksAuthenticated", "False", "RanksUnauthenticated")
    world.wait_event(namespace, "m", "RanksUnauthenticated")
    selector = world.read("Service", namespace, "m")["spec"]["selector"]
    chosen = world.find("Pod", namespace, ",".join(f"{key}={value}" for key, value in selector.items()))
    assert [pod["metadata"]["name"] for pod in chosen] == ["m-0"]
    assert world.get("Deployment", namespace, "m") is None
    applies = [key for key in world.writes().elements() if key.endswith(f"leaderworkersets {namespace}/m")]
    assert len(applies) == 1


def test_a_recreated_group_is_counted_and_five_are_a_crash_loop_with_a_delay(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    pods = deploy(world, namespace)
    for life in range(1, 6):
        settle_all(world, namespace, pods)
        wait_in_status(world, namespace, pods["m-0"])
        groups.settle(world, namespace, pods["m-0-1"], restarts=1)
        pods = wait_other_pods(world, namespace, pods)
        wait_in_status(world, namespace, pods["m-0"])
        assert len(world.status(namespace, "m")["groups"][0]["recreations"]) == life
    settle_all(world, namespace, pods, ready=False)
    world.wait_condition(namespace, "m", "Stalled", "True", "GroupCrashLoop")
    world.wait_event(namespace, "m", "GroupCrashLoop")
    delay = eventually("the delay", lambda: world.get("ConfigMap", namespace, "m-start-delay"))
    assert delay["data"] == {"seconds": "10"}
    assert uids(groups.group_pods(world, namespace, "m")) == uids(pods), "a delay replaces no pod"


def test_a_rollout_replaces_whole_groups_one_after_the_other_and_mixes_no_revisions(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    before = deploy(world, namespace, replicas=1)
    settle_all(world, namespace, before)
    world.wait_condition(namespace, "m", "Ready", "True")
    world.patch("LLMDeployment", namespace, "m", {"spec": {"engine": {"maxNumSeqs": 7}}})

    after = wait_other_pods(world, namespace, before)
    hashes = {pod["metadata"]["annotations"]["serving.quire.dev/template-hash"] for pod in after.values()}
    assert len(hashes) == 1
    world.wait_condition(namespace, "m", "RolloutComplete", "False")
    settle_all(world, namespace, after)
    world.wait_condition(namespace, "m", "Ready", "True", "AllReplicasReady")
    assert "recreations" not in world.status(namespace, "m")["groups"][0]


def test_an_autoscalers_number_of_groups_is_kept(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    pods = deploy(world, namespace, autoscaling={"minReplicas": 1, "maxReplicas": 3})
    settle_all(world, namespace, pods)
    world.wait_condition(namespace, "m", "Ready", "True")
    scaler = world.read("HorizontalPodAutoscaler", namespace, "m")
    assert scaler["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    world.scale(namespace, "m", 2, kind="LeaderWorkerSet")

    settle_all(world, namespace, groups.wait_group_pods(world, namespace, "m", 4))
    eventually(
        "both groups are in the status",
        lambda: world.status(namespace, "m").get("readyReplicas") == 2,
    )
    assert world.read("LeaderWorkerSet", namespace, "m")["spec"]["replicas"] == 2


def test_groups_of_another_size_are_made_anew(
    operator: OperatorProcess, world: World, namespace: str
) -> None:
    before = deploy(world, namespace, resources={"cpu": "4", "memory": "2Gi"})
    settle_all(world, namespace, before)
    world.patch("LLMDeployment", namespace, "m", {"spec": {"parallelism": {"tensor": 3, "nodes": 3}}})

    after = wait_other_pods(world, namespace, before, count=3)
    assert world.read("LeaderWorkerSet", namespace, "m")["spec"]["leaderWorkerTemplate"]["size"] == 3
    assert {pod["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/size"] for pod in after.values()} == {
        "3"
    }


@pytest.mark.parametrize("change", ["rollout", "scale-down"])
def test_the_workers_of_a_group_that_drains_get_their_signal_once_the_leader_has_ended(
    operator: OperatorProcess, world: World, namespace: str, change: str
) -> None:
    """So the leader can finish its streams, for which it needs them: LeaderWorkerSet deletes it first."""
    before = deploy(world, namespace)
    for pod in before.values():
        groups.bind(world, namespace, pod)
    settle_all(world, namespace, before)
    world.wait_condition(namespace, "m", "Ready", "True")
    edit = {"engine": {"maxNumSeqs": 7}} if change == "rollout" else {"replicas": 0}
    world.patch("LLMDeployment", namespace, "m", {"spec": edit})

    def ending() -> set[str]:
        found = groups.group_pods(world, namespace, "m")
        return {name for name, pod in found.items() if groups.is_ending(pod)}

    eventually("the leader gets its signal", lambda: "m-0" in ending())
    assert world.read("Pod", namespace, "m-0")["metadata"]["deletionGracePeriodSeconds"] > 60, "it may drain"
    for _ in range(20):  # as many looks at the cluster; LeaderWorkerSet acts within a few milliseconds
        assert ending() == {"m-0"}, "its worker goes on"
    groups.end(world, namespace, "m-0")
    eventually(
        "the worker gets its signal",
        lambda: "m-0-1" in ending() or "m-0-1" not in groups.group_pods(world, namespace, "m"),
    )


def test_a_group_that_waits_for_a_node_for_two_minutes_is_told_with_who_waits_and_why(
    world: World, half_placed: str
) -> None:
    def incomplete() -> Body | None:
        found = world.condition(half_placed, "m", "Ready")
        assert found["reason"] in ("WaitingForNode", "GroupIncomplete")
        return found if found["reason"] == "GroupIncomplete" else None

    message = eventually("GroupIncomplete", incomplete, seconds=180)["message"]
    assert "m-0-1" in message and "2 Insufficient cpu" in message
    world.wait_condition(half_placed, "m", "Degraded", "True", "GroupIncomplete")
    world.wait_event(half_placed, "m", "GroupIncomplete")
    assert len(groups.group_pods(world, half_placed, "m")) == 2, "it keeps what it has"
