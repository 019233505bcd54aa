"""Which pods the operator asks for their /statusz, against a real HTTP server."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from e2e.operator import pods
from e2e.operator.statusz import HEALTH_PORT, statusz_server
from e2e.ports import free_port
from quire_operator import names, poller
from quire_operator.cluster import Cluster, Key
from quire_operator.poller import Poller
from tests.operator.fake_api import FakeApi, connected

SERVING = {"phase": "serving", "effective": None}


def pod(ip: str, status: dict[str, Any], version: int = 1) -> dict[str, Any]:
    metadata = {"name": "m-0", "namespace": "ns", "uid": "p1", "labels": {names.LABEL_NAME: "m"}}
    return {
        "kind": "Pod",
        "metadata": {**metadata, "resourceVersion": str(version)},
        "status": {**status, "podIP": ip},
    }


async def test_a_pod_that_was_ready_before_the_operator_started_is_asked_once() -> None:
    changed: list[Key] = []
    with statusz_server(SERVING) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = Cluster(connection, fence=lambda: None, instance="op")
            poller = Poller(cluster, changed.append, port=HEALTH_PORT)
            cluster.cache.put(pod(server.ip, pods.ready()))
            for _ in range(20):
                await poller.poll(session)

        assert server.asked == 1
    assert changed == [Key("ns", "m")] and cluster.samples["p1"].phase == "serving"


async def test_a_ready_pod_that_does_not_answer_is_not_asked_for_ever() -> None:
    with statusz_server({"phase": "?"}) as server:
        async with connected(FakeApi()) as connection, aiohttp.ClientSession() as session:
            cluster = Cluster(connection, fence=lambda: None, instance="op")
            poller = Poller(cluster, lambda key: None, port=HEALTH_PORT)
            cluster.cache.put(pod(server.ip, pods.ready()))
            for _ in range(20):
                await poller.poll(session)

        assert server.asked == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "not-an-address"])
async def test_a_pod_that_cannot_be_reached_has_no_answer(address: str) -> None:
    """Pods that are not ready yet refuse connections all the time, so nothing is logged."""
    async with aiohttp.ClientSession() as session:
        assert await poller.fetch(session, address, free_port()) is None
