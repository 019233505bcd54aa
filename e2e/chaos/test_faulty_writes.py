"""Writes that fail, or that succeed without an answer, and another client that writes the same fields."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from e2e.api.client import Client
from e2e.chaos.children import Body, children
from e2e.chaos.conftest import CREATED, UPDATED, settled
from e2e.cluster.apiserver import ApiServer
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import LOST, Proxy
from e2e.operator.world import World
from e2e.waiting import eventually

MODELS = 10
SHARE = 0.2
STORM_SECONDS = 40


@pytest.mark.deep
@pytest.mark.api
@pytest.mark.timeout(240)
@pytest.mark.chaos(
    5, fault="20 % of all writes: 409, 429, 500, done but not answered", proof="answers counted"
)
def test_when_a_fifth_of_the_writes_fail_few_are_repeated_and_the_children_are_the_same(
    world: World,
    namespace: str,
    proxy: Proxy,
    start: Callable[..., OperatorProcess],
    undisturbed: dict[str, dict[str, Body]],
    record_property: Callable[[str, object], None],
) -> None:
    others = [world.namespace(f"{namespace}-{number}") for number in range(MODELS)]
    watched = ",".join((namespace, *others))
    operator = start("faulty", QUIRE_WATCH_NAMESPACES=watched).wait_leading(world)
    world.deploy(namespace, "m", **CREATED)
    settled(world, namespace)
    world.patch("LLMDeployment", namespace, "m", {"spec": dict(UPDATED)})
    settled(world, namespace)
    cost = quiet(proxy)

    chance = random.Random(7)
    proxy.fault = lambda: chance.choice((409, 429, 500, LOST)) if chance.random() < SHARE else None
    for other in others:
        world.deploy(other, "m", **CREATED)
    for other in others:
        settled(world, other)
        world.patch("LLMDeployment", other, "m", {"spec": dict(UPDATED)})
    for other in others:
        eventually(
            f"{other} is as undisturbed",
            lambda other=other: children(world, other, "m") == undisturbed["updated"],  # type: ignore[misc]  # mypy infers no lambda that has a default
        )
        settled(world, other)
    proxy.fault = lambda: None
    writes = quiet(proxy) - cost

    assert set(proxy.faults) == {409, 429, 500, LOST}, "the faults took effect"
    assert writes <= 3 * cost * MODELS
    assert operator.code is None
    faults = sum(proxy.faults.values())
    record_property("measured", f"{faults} faults; {writes / cost / MODELS:.2f} times the undisturbed writes")


def quiet(proxy: Proxy) -> int:
    """The number of writes once there are no more of them."""
    last, since = proxy.writes, time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        if proxy.writes != last:
            last, since = proxy.writes, time.monotonic()
        return time.monotonic() - since > 3

    eventually("no more writes", is_quiet)
    return last


@pytest.mark.timeout(240)
@pytest.mark.chaos(
    6,
    fault=f"another manager rewrites replicas and labels 10 times a second, {STORM_SECONDS} s",
    proof="its writes",
)
def test_repeated_edits_by_another_client_cause_few_writes_and_are_repaired_in_the_end(
    world: World,
    server: ApiServer,
    namespace: str,
    start: Callable[..., OperatorProcess],
    undisturbed: dict[str, dict[str, Body]],
    record_property: Callable[[str, object], None],
) -> None:
    start("stormed", QUIRE_WATCH_NAMESPACES=namespace).wait_leading(world)
    world.deploy(namespace, "m", **CREATED)
    settled(world, namespace)
    before, events = world.writes(), len(world.events(namespace, "m"))
    ended = threading.Event()
    versions: list[str] = []

    def storm() -> None:
        with Client(server.kubeconfig) as client:
            other = World(client, world.audit_log)
            for number in range(10 * STORM_SECONDS):
                patch = {
                    "metadata": {"labels": {"app.kubernetes.io/name": f"theirs-{number}"}},
                    "spec": {"replicas": 1 + number % 2},
                }
                versions.append(
                    other.patch("Deployment", namespace, "m", patch)["metadata"]["resourceVersion"]
                )
                time.sleep(0.1)
        ended.set()

    threading.Thread(target=storm, daemon=True).start()
    eventually("the storm is over", ended.is_set, seconds=4 * STORM_SECONDS)
    new = world.writes() - before
    applied, reported = new[f"patch deployments {namespace}/m"], len(world.events(namespace, "m")) - events
    writes = sum(n for what, n in new.items() if " leases " not in what)

    assert len(set(versions)) >= 9 * STORM_SECONDS, "each of its writes changed something"
    assert 1 <= applied <= 6 + STORM_SECONDS / 5
    assert reported <= 3
    assert writes <= applied + 20 + STORM_SECONDS, "the status is written once a second at most"
    eventually("mended", lambda: children(world, namespace, "m") == undisturbed["created"])
    record_property(
        "measured", f"{len(versions)} of theirs, {applied} of ours ({writes} with status), {reported} Events"
    )
