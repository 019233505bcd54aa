"""Two models share an accelerator: one runs, and a gateway's Lease gets the other its turn. With the chart's
rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from e2e.operator import pods
from e2e.operator.process import OperatorProcess
from e2e.operator.statusz import StatuszServer, statusz_server
from e2e.operator.test_scale_to_zero import BUSY, QUIET, gateway, renew
from e2e.operator.world import World
from e2e.waiting import eventually
from quire_gateway import demand
from quire_gateway.kube_api import KubeApi

__all__ = ["gateway"]

pytestmark = [pytest.mark.api, pytest.mark.timeout(180)]


@pytest.fixture
def servers() -> Iterator[dict[str, StatuszServer]]:
    """The health port of the pod of each."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(statusz_server(dict(BUSY))) for name in ("a", "b")}


def number(world: World, namespace: str, name: str) -> int:
    return int(world.read("Deployment", namespace, name)["spec"]["replicas"])


def numbers(world: World, namespace: str) -> tuple[int, int]:
    return number(world, namespace, "a"), number(world, namespace, "b")


def serve(world: World, namespace: str, name: str, server: StatuszServer) -> None:
    """A pod that is ready, as the controllers and the kubelet would have it."""
    ready = pods.status(pods.running(ready=True), conditions=(pods.condition("Ready", "True"),), ip=server.ip)
    world.make_pod(namespace, name, ready)
    world.roll_out(namespace, name, ready=1)


def stop_pods(world: World, namespace: str, name: str) -> None:
    """What controllers do where no pod is wanted; the last one of them goes last."""
    for kind in ("ReplicaSet", "Pod"):
        for one in world.find(kind, namespace, f"serving.quire.dev/name={name}"):
            world.delete(kind, namespace, one["metadata"]["name"])
    world.roll_out(namespace, name, ready=0)


def let_a_serve_beside_b(world: World, namespace: str, server: StatuszServer, stay: int) -> None:
    """Two that share, of which the first has the accelerator."""
    for name in ("a", "b"):
        world.deploy(namespace, name, sharing={"pool": "card", "minimumStaySeconds": stay})
        eventually(f"all children of {name}", partial(world.has_children, namespace, name))
    assert numbers(world, namespace) == (1, 0), "the first has the accelerator"
    for name in ("a", "b"):
        world.roll_out(namespace, name, ready=0)
    serve(world, namespace, "a", server)


def test_a_model_that_is_waited_for_gets_the_accelerator_once_the_others_pod_is_gone(
    world: World,
    namespace: str,
    start: Callable[..., OperatorProcess],
    gateway: KubeApi,
    servers: dict[str, StatuszServer],
) -> None:
    process = start("op-sharing", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)
    let_a_serve_beside_b(world, namespace, servers["a"], stay=10)
    world.wait_condition(namespace, "a", "Ready", "True")
    world.wait_condition(namespace, "b", "Ready", "False", "Asleep")
    assert world.status(namespace, "b")["phase"] == "Idle"
    assert world.status(namespace, "b")["sharing"] == {"pool": "card", "state": "Asleep", "awake": "a"}

    def with_demand(number: tuple[int, int]) -> bool:
        renew(gateway, namespace, demand.timestamp(), "b")
        return numbers(world, namespace) == number

    renew(gateway, namespace, demand.timestamp(), "b")
    waits = eventually("b waits", lambda: is_waiting(world, namespace))
    assert waits["awake"] == "a" and "turnTime" in waits
    assert numbers(world, namespace) == (1, 0), "a has its minimum stay"
    eventually("a makes room", lambda: with_demand((0, 0)))
    world.wait_condition(namespace, "b", "Ready", "False", "Waiting")
    assert numbers(world, namespace) == (0, 0), "the pod of a is still there"

    stop_pods(world, namespace, "a")
    eventually("b starts", lambda: with_demand((0, 1)))
    serve(world, namespace, "b", servers["b"])
    world.wait_condition(namespace, "b", "Ready", "True")
    awake = eventually("it says how long that took", lambda: swapped(world, namespace))
    assert awake["state"] == "Awake" and "turnTime" not in awake
    world.wait_condition(namespace, "a", "Ready", "False", "Asleep")
    world.wait_event(namespace, "a", "Asleep")
    world.wait_event(namespace, "b", "Waiting")
    counted = f'quire_operator_swap_seconds_count{{namespace="{namespace}",pool="card"}}'
    assert process.metrics()[counted] == 1


def is_waiting(world: World, namespace: str) -> dict[str, str] | None:
    found: dict[str, str] = world.status(namespace, "b").get("sharing") or {}
    return found if found.get("state") == "Waiting" else None


def swapped(world: World, namespace: str) -> dict[str, str] | None:
    found: dict[str, str] = world.status(namespace, "b").get("sharing") or {}
    return found if "lastSwapSeconds" in found else None


@pytest.mark.deep
def test_a_model_without_requests_makes_room_before_its_stay_is_over_and_a_new_operator_goes_on(
    world: World,
    namespace: str,
    start: Callable[..., OperatorProcess],
    gateway: KubeApi,
    servers: dict[str, StatuszServer],
) -> None:
    first = start("op-sharing-1", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)
    let_a_serve_beside_b(world, namespace, servers["a"], stay=3600)
    servers["a"].answer = QUIET
    first.stop()

    start("op-sharing-2", QUIRE_GATEWAY_NAMESPACES=namespace).wait_leading(world)

    def made_room() -> bool:
        renew(gateway, namespace, demand.timestamp(), "b")
        return numbers(world, namespace) == (0, 0)

    eventually("a makes room", made_room)
    stop_pods(world, namespace, "a")
    eventually("b starts", lambda: numbers(world, namespace) == (0, 1))


def test_without_a_gateway_the_first_one_keeps_the_accelerator_and_the_status_says_why(
    world: World, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    start("op-sharing-none").wait_leading(world)
    for name in ("a", "b"):
        world.deploy(namespace, name, sharing={"pool": "card"})
    found = world.wait_condition(namespace, "b", "ActivatorReady", "False", "PoolWithoutGateway")
    assert "gateway.namespaces" in found["message"]
    world.wait_event(namespace, "b", "PoolWithoutGateway")
