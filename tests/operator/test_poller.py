"""Which pods the operator asks for their /statusz, against a real HTTP server."""

from __future__ import annotations

import itertools
from typing import Any

import aiohttp
import pytest

from e2e.operator import pods
from e2e.operator.statusz import HEALTH_PORT, statusz_server
from e2e.ports import free_port
from quire_operator import names, poller, slow_ranks
from quire_operator.cluster import Cluster, Connection, Key
from quire_operator.poller import ROUNDS_PER_LOAD, Poller
from tests.operator.fake_api import FakeApi, connected

SERVING = {"phase": "serving", "effective": None}


def owned(kind: str, uid: str, owner: str = "") -> dict[str, Any]:
    """An object of the LLMDeployment ns/m, with the uid of its controller."""
    metadata: dict[str, Any] = {"name": uid if kind != names.KIND else "m", "namespace": "ns", "uid": uid}
    metadata |= {"labels": {names.LABEL_NAME: "m"}, "resourceVersion": "1"}
    if owner:
        metadata["ownerReferences"] = [{"uid": owner, "controller": True}]
    return {"kind": kind, "metadata": metadata}


WORKLOAD = (
    owned(names.KIND, "llm"),
    owned("Deployment", "deployment", "llm"),
    owned("ReplicaSet", "set", "deployment"),
    owned("Job", "job", "llm"),
)


def pod(ip: str, status: dict[str, Any], owner: str = "set", uid: str = "p1") -> dict[str, Any]:
    return owned("Pod", uid, owner) | {"status": {**status, "podIP": ip}}


def cluster_with(connection: Connection, *objects: dict[str, Any]) -> Cluster:
    cluster = Cluster(connection, fence=lambda: None, instance="op")
    for body in (*WORKLOAD, *objects):
        cluster.cache.put(body)
    return cluster


async def test_a_pod_that_was_ready_before_the_operator_started_is_asked_once() -> None:
    changed: list[Key] = []
    with statusz_server(SERVING) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = cluster_with(connection, pod(server.ip, pods.ready()))
            poller = Poller(cluster, changed.append, port=HEALTH_PORT)
            for _ in range(20):
                await poller.poll(session)

        assert server.asked == 1
    assert changed == [Key("ns", "m")] and cluster.samples["p1"].phase == "serving"


async def test_a_ready_pod_that_does_not_answer_is_not_asked_for_ever() -> None:
    with statusz_server({"phase": "?"}) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = cluster_with(connection, pod(server.ip, pods.ready()))
            poller = Poller(cluster, lambda key: None, port=HEALTH_PORT)
            for _ in range(20):
                await poller.poll(session)

        assert server.asked == 1


@pytest.mark.parametrize(("has_prefill", "asked"), [(False, 1), (True, 4)])
async def test_ready_decode_pods_are_asked_now_and_then_whether_transfers_fail(
    has_prefill: bool, asked: int
) -> None:
    """Nothing in Kubernetes changes when a decode pod has to compute prompts itself."""
    prefill = owned("Deployment", "prefill", "llm")
    prefill["metadata"]["name"] = names.workload("m", names.ROLE_PREFILL)
    with statusz_server({**SERVING, "transferDegraded": True}) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = cluster_with(
                connection, pod(server.ip, pods.ready()), *([prefill] if has_prefill else [])
            )
            poller = Poller(cluster, lambda key: None, port=HEALTH_PORT)
            for _ in range(3 * ROUNDS_PER_LOAD):
                await poller.poll(session)

        assert server.asked == asked
    assert cluster.samples["p1"].transfer_degraded


def in_group(ip: str, role: str) -> dict[str, Any]:
    """A ready pod of group 0."""
    body = pod(ip, pods.ready(), uid=role)
    body["metadata"]["labels"] |= {names.LABEL_GROUP_INDEX: "0", names.LABEL_ROLE: role}
    return body


def of_ranks(step: int, *seconds: float) -> dict[str, Any]:
    ranks = [{"rank": rank, "lastStep": step, "stepSeconds": each} for rank, each in enumerate(seconds)]
    return {**SERVING, "running": step, "queued": 0, "ranks": ranks}


async def test_a_ready_leader_is_asked_now_and_then_which_rank_is_slow_and_that_alone_is_news() -> None:
    """Its workers report nothing else, and other numbers are others in each answer."""
    changed: list[Key] = []
    named: list[int | None] = []
    with statusz_server(SERVING) as leader, statusz_server(SERVING) as worker:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            pair = in_group(leader.ip, names.ROLE_LEADER), in_group(worker.ip, names.ROLE_WORKER)
            cluster = cluster_with(connection, *pair)
            poller = Poller(cluster, changed.append, port=HEALTH_PORT)
            for number in range(4 * slow_ranks.POLLS):
                is_slow = slow_ranks.POLLS <= number < 2 * slow_ranks.POLLS
                leader.answer = of_ranks(number, 0.010, 0.030 if is_slow else 0.011)
                for _ in range(ROUNDS_PER_LOAD):
                    await poller.poll(session)
                named.append(cluster.samples[names.ROLE_LEADER].slow_rank)

        assert leader.asked == 1 + 4 * slow_ranks.POLLS and worker.asked == 1
    assert [each for each, _ in itertools.groupby(named)] == [None, 1, None]
    assert len(changed) == 2 + 2, "when they are first heard, when it is named, and when it has recovered"


@pytest.mark.parametrize("owner", ["", "strange-set", "deployment"])
async def test_a_pod_that_only_carries_the_labels_is_not_asked(owner: str) -> None:
    """A thousand such pods that do not answer would delay what is known of everyone's."""
    strange = (owned("Deployment", "strange", "other-llm"), owned("ReplicaSet", "strange-set", "strange"))
    with statusz_server(SERVING) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = cluster_with(connection, *strange, pod(server.ip, pods.ready(), owner))
            poller = Poller(cluster, lambda key: None, port=HEALTH_PORT)
            await poller.poll(session)
            assert server.asked == 0
            cluster.cache.put(pod(server.ip, pods.ready(), "job", "p2"))
            await poller.poll(session)

        assert server.asked == 1 and set(cluster.samples) == {"p2"}


@pytest.mark.parametrize("address", ["127.0.0.1", "not-an-address"])
async def test_a_pod_that_cannot_be_reached_has_no_answer(address: str) -> None:
    """Pods that are not ready yet refuse connections all the time, so nothing is logged."""
    async with aiohttp.ClientSession() as session:
        assert await poller.fetch(session, address, free_port()) is None


async def test_ready_pods_with_adapters_are_asked_often_while_one_is_on_its_way_and_then_now_and_then() -> (
    None
):
    llm = owned(names.KIND, "llm") | {"spec": {"adapters": [{"name": "a"}]}}
    llm["metadata"]["resourceVersion"] = "2"
    changed: list[Key] = []

    def said(state: str, running: int) -> dict[str, Any]:
        return {**SERVING, "running": running, "queued": 0, "adapters": [{"name": "a", "state": state}]}

    with statusz_server(said("Ready", 0)) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = cluster_with(connection, llm, pod(server.ip, pods.ready()))
            poller = Poller(cluster, changed.append, port=HEALTH_PORT)
            for number in range(3 * ROUNDS_PER_LOAD):
                server.answer = said("Ready", number)
                await poller.poll(session)
            assert server.asked == 4 and len(changed) == 2, (
                "once it is known, the number of requests is no news"
            )
            server.answer = said("Fetching", 0)
            for _ in range(3 * ROUNDS_PER_LOAD):
                await poller.poll(session)
            assert server.asked == 4 + 2 * ROUNDS_PER_LOAD + 1

    assert len(changed) == 3 and cluster.samples["p1"].adapters[0].state == "Fetching"
