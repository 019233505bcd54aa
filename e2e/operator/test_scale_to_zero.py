"""A model without requests stops its pods; a gateway's Lease starts one again. With the chart's rights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.operator import pods, rights
from e2e.operator.process import OperatorProcess
from e2e.operator.statusz import StatuszServer, statusz_server
from e2e.operator.test_autoscaling import count
from e2e.operator.world import OPERATOR_NAMESPACE, World
from e2e.waiting import eventually
from quire_gateway import demand
from quire_gateway.informer import LEASES
from quire_gateway.kube_api import KubeApi

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]

SCALED = {"minReplicas": 0, "maxReplicas": 4, "idle": {"afterSeconds": 30}}
BUSY = {"phase": "serving", "running": 1, "queued": 0, "secondsSinceRequest": 0.0}
QUIET = {"phase": "serving", "running": 0, "queued": 0, "secondsSinceRequest": 31.0}


@pytest.fixture
def pod() -> Iterator[StatuszServer]:
    with statusz_server(BUSY) as server:
        yield server


@pytest.fixture
def gateway(world: World, tmp_path: Path) -> KubeApi:
    """The gateway's own client, with the rights of its ServiceAccount."""
    (tmp_path / "token").write_text(rights.token(world, "quire-gateway"))
    (tmp_path / "ca.crt").write_bytes(world.client.authority.read_bytes())
    return KubeApi(world.client.url, tmp_path)


def renew(
    gateway: KubeApi, namespace: str, renewed: str = "2026-01-01T00:00:00.000000Z", name: str = "m"
) -> None:
    """As a gateway does while requests wait for the model; by default with a clock that is far behind."""
    body = demand.lease((namespace, name), renewed)
    path = (
        f"{LEASES.path(OPERATOR_NAMESPACE)}/{body['metadata']['name']}?fieldManager=quire-gateway&force=true"
    )

    async def send() -> None:
        async with gateway.connect() as connection:
            await connection.send("PATCH", path, body, "application/apply-patch+yaml")

    asyncio.run(send())


def serve(world: World, namespace: str, pod: StatuszServer) -> None:
    """A pod that is ready, as the controllers and the kubelet would have it."""
    ready = pods.status(pods.running(ready=True), conditions=(pods.condition("Ready", "True"),), ip=pod.ip)
    world.make_pod(namespace, "m", ready)
    world.roll_out(namespace, "m", ready=1)


def test_pods_stop_without_requests_and_one_starts_when_a_gateway_asks(
    world: World, namespace: str, start: Callable[..., OperatorProcess], gateway: KubeApi, pod: StatuszServer
) -> None:
    start("op-zero", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)
    world.deploy(namespace, "m", autoscaling=SCALED)
    eventually("all children", lambda: world.has_children(namespace, "m"))
    assert count(world, namespace) == 1, "it starts once, so that an error shows"
    serve(world, namespace, pod)
    world.wait_condition(namespace, "m", "ActivatorReady", "True", "GatewayInstalled")
    world.wait_condition(namespace, "m", "Ready", "True")
    asked = pod.asked
    eventually("it is asked whether it is idle", lambda: pod.asked > asked + 1)
    assert count(world, namespace) == 1, "it has a request"

    pod.answer = QUIET
    eventually("no pod is wanted", lambda: count(world, namespace) == 0)
    for one in world.find("Pod", namespace):
        world.delete("Pod", namespace, one["metadata"]["name"])
    world.roll_out(namespace, "m", ready=0)
    world.wait_condition(namespace, "m", "ScalingActive", "True", "Idle")
    assert world.status(namespace, "m")["phase"] == "Idle"

    begun = time.monotonic()
    renew(gateway, namespace)
    eventually("a pod is wanted", lambda: count(world, namespace) == 1)
    print(f"from the Lease to the number: {time.monotonic() - begun:.3f} s")
    pod.answer = BUSY
    serve(world, namespace, pod)
    world.wait_condition(namespace, "m", "Ready", "True")


def test_without_a_gateway_for_the_namespace_a_model_stays_awake_and_the_status_says_why(
    world: World, namespace: str, start: Callable[..., OperatorProcess], pod: StatuszServer
) -> None:
    pod.answer = QUIET
    start("op-no-gateway").wait_leading(world)
    world.deploy(namespace, "m", autoscaling=SCALED)
    serve(world, namespace, pod)
    found = world.wait_condition(namespace, "m", "ActivatorReady", "False", "GatewayMissing")
    assert "gateway.namespaces" in found["message"]
    asked = pod.asked
    eventually("it is known to be idle", lambda: pod.asked > asked + 1)
    assert count(world, namespace) == 1
    world.wait_event(namespace, "m", "GatewayMissing")


@pytest.mark.deep
def test_an_operator_that_starts_finds_a_lease_that_is_there(
    world: World, namespace: str, start: Callable[..., OperatorProcess], gateway: KubeApi, pod: StatuszServer
) -> None:
    pod.answer = QUIET
    first = start("op-first", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)
    world.deploy(namespace, "m", autoscaling=SCALED)
    serve(world, namespace, pod)
    eventually("no pod is wanted", lambda: count(world, namespace) == 0)
    first.stop()

    renew(gateway, namespace, demand.timestamp())
    start("op-second", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)
    eventually("a pod is wanted", lambda: count(world, namespace) == 1)
