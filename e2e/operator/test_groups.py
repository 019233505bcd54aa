"""Groups of pods that LeaderWorkerSet itself creates: what the operator's objects rely on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.apiserver import ApiServer
from e2e.operator import groups
from e2e.operator.audited import audited
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
def world(audited_world: tuple[ApiServer, World]) -> World:
    return audited_world[1]


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
