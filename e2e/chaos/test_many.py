"""A thousand LLMDeployments: a slow API server, another release of the operator, and churn for half an hour.

CHAOS_MINUTES says for how long the churn lasts.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from e2e.operator import rights
from e2e.operator.audited import audited
from e2e.operator.fleet import Fleet, megabytes, reconciles, wait_idle
from e2e.operator.process import OperatorProcess
from e2e.operator.proxy import Proxy, proxied
from e2e.operator.world import World
from e2e.waiting import eventually

MINUTES = float(os.environ.get("CHAOS_MINUTES", "30"))
SIZE = 1000
EDITS = 100
LATENCY = 0.5
CHURN_PER_SECOND = 10
HISTORY = 10  # revisions of each that are kept at most

pytestmark = pytest.mark.timeout(900 + 120 * MINUTES)
Record = Callable[[str, object], None]
Start = Callable[..., OperatorProcess]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Proxy, Start]]:
    """A serving fleet whose operator is stopped."""
    directory = tmp_path_factory.mktemp("crowd")
    started: list[OperatorProcess] = []
    with audited() as (server, world), proxied(server) as proxy:
        kubeconfig = rights.token_kubeconfig(server, world, "quire-operator", directory / "kubeconfig")
        text = kubeconfig.read_text(encoding="utf-8")
        kubeconfig.write_text(text.replace(server.url, f"https://127.0.0.1:{proxy.port}"), encoding="utf-8")

        def start(name: str, **environ: str) -> OperatorProcess:
            started.append(OperatorProcess(name, kubeconfig, directory, **environ).start())
            return started[-1].wait_leading(world)

        fleet = Fleet(world, SIZE)
        fleet.make_namespaces()
        first = start("release-1")
        fleet.each(fleet.make_and_serve)
        eventually("all serve", lambda: fleet.serving() == SIZE, seconds=300, poll=2)
        wait_idle(first)
        first.stop()
        try:
            yield fleet, proxy, start
        finally:
            proxy.latency = 0
            for process in started:
                process.stop()


@pytest.mark.chaos(
    14, fault=f"another operator with other defaults, {SIZE} LLMDeployments", proof="newer revision reported"
)
def test_a_release_with_other_defaults_writes_no_child_of_a_thousand_llmdeployments(
    crowd: tuple[Fleet, Proxy, Start], record_property: Record
) -> None:
    fleet, _, start = crowd
    before = fleet.world.writes()
    changed = {"QUIRE_ENGINE_IMAGE": "registry.example/e:2", "QUIRE_MONITORING_NAMESPACE_LABELS": "team=m"}
    operator = start("release-2", **changed)
    eventually("all are looked at", lambda: reconciles(operator) >= SIZE)
    wait_idle(operator)

    new = fleet.world.writes() - before
    statuses = sum(count for what, count in new.items() if " llmdeployments/status " in what)
    children = {
        what
        for what in new
        if not any(f" {own}" in what for own in ("llmdeployments/", "leases ", "events "))
    }
    assert children == set()
    reported = [
        fleet.world.status(*fleet.place(n)).get("availableRenderRevision") for n in range(0, SIZE, 50)
    ]
    assert all(reported), "the defaults did change"
    record_property("measured", f"0 child writes, {statuses} status writes")
    operator.stop()


@pytest.mark.chaos(
    7, fault=f"{LATENCY * 1000:.0f} ms latency of every answer, {SIZE} LLMDeployments", proof="time of a GET"
)
def test_a_slow_api_server_slows_reconciles_within_5_seconds_and_fails_no_probe(
    crowd: tuple[Fleet, Proxy, Start], record_property: Record
) -> None:
    fleet, proxy, start = crowd
    operator = start("patient")
    eventually("all are looked at", lambda: reconciles(operator) >= SIZE)
    wait_idle(operator)
    before = buckets(operator)
    proxy.latency = LATENCY
    for number in range(EDITS):
        world, (namespace, name) = fleet.world, fleet.place(number * SIZE // EDITS)
        world.patch("LLMDeployment", namespace, name, {"spec": {"rollout": {"restartId": f"slow-{number}"}}})
        assert operator.ask("/healthz")[0] == 200
        time.sleep(0.2)
    eventually("all are answered", lambda: all_are_answered(fleet.world), seconds=300, poll=1)
    new = {edge: count - before[edge] for edge, count in buckets(operator).items()}
    p99 = next(edge for edge, count in sorted(new.items()) if count >= 0.99 * max(new.values()))

    assert operator.ask("/healthz")[0] == 200
    assert new[0.25] < max(new.values()) - EDITS / 2, "the latency took effect"
    assert p99 <= 5
    record_property("measured", f"{max(new.values()):.0f} reconciles, p99 <= {p99:g} s")
    operator.stop()


def buckets(operator: OperatorProcess) -> dict[float, float]:
    """The number of reconciles that took at most so many seconds."""
    prefix = 'quire_operator_reconcile_seconds_bucket{le="'
    found = {n.removeprefix(prefix)[:-2]: v for n, v in operator.metrics().items() if n.startswith(prefix)}
    return {float(edge): count for edge, count in found.items()}


@pytest.mark.chaos(
    13, fault=f"{CHURN_PER_SECOND} changes a second to {SIZE} LLMDeployments", proof="changes counted"
)
def test_churn_leaks_no_memory_and_raises_no_exception(
    crowd: tuple[Fleet, Proxy, Start], record_property: Record
) -> None:
    fleet, proxy, start = crowd
    proxy.latency = 0
    operator = start("churned")
    fill_histories(fleet)
    chance = random.Random(13)
    began, changes = time.monotonic(), 0
    samples: list[float] = []
    while (now := time.monotonic() - began) < 60 * MINUTES:
        change(fleet, chance, changes)
        changes += 1
        if len(samples) < now / 2:
            samples.append(megabytes(operator.pid))
            assert operator.code is None, operator.tail()
        time.sleep(max(0.0, changes / CHURN_PER_SECOND - (time.monotonic() - began)))
    eventually("all are answered", lambda: all_are_answered(fleet.world), seconds=300, poll=1)

    third = len(samples) // 3
    middle, last = statistics.fmean(samples[third : 2 * third]), statistics.fmean(samples[-third:])
    assert changes > CHURN_PER_SECOND * 60 * MINUTES * 0.7
    assert reconciles(operator, "bug") == 0 and "Traceback" not in operator.log.read_text()
    assert last - middle < 1, f"MB more in the last third of the time: {samples}"
    memory = f"{middle:.2f} MB in the second third, {last:.2f} MB in the last"
    slope = (last - middle) / (MINUTES / 3 / 60)
    record_property(
        "measured", f"{changes} changes in {MINUTES:g} minutes; {memory}: {slope:+.2f} MB an hour"
    )


def fill_histories(fleet: Fleet) -> None:
    """Fill every revision history to its limit, so that memory does not grow during the test."""
    for turn in range(HISTORY):
        fleet.each(partial(edit, fleet, maxNumSeqs=100 + turn))
        eventually("all are answered", lambda: all_are_answered(fleet.world), seconds=300, poll=1)
    revisions = fleet.world.client.request("GET", "/apis/apps/v1/controllerrevisions?limit=1")
    assert revisions["metadata"]["remainingItemCount"] + 1 >= HISTORY * SIZE


def edit(fleet: Fleet, number: int, **engine: int) -> None:
    """Change an engine argument of one of them: another revision."""
    fleet.world.patch("LLMDeployment", *fleet.place(number), {"spec": {"engine": engine}})


def change(fleet: Fleet, chance: random.Random, turn: int) -> None:
    """A random user action: edit, scale, label, or delete a child."""
    number = chance.randrange(SIZE)
    world, (namespace, name) = fleet.world, fleet.place(number)
    match chance.randrange(5):
        case 0:
            world.patch("LLMDeployment", namespace, name, {"spec": {"replicas": chance.randint(1, 9)}})
        case 1 | 2:
            edit(fleet, number, maxNumSeqs=chance.randint(1, 64))
        case 3:
            if world.get("Service", namespace, name):
                world.delete("Service", namespace, name)
        case _:
            world.patch("LLMDeployment", namespace, name, {"metadata": {"labels": {"turn": str(turn)}}})


def all_are_answered(world: World) -> bool:
    items = world.client.request("GET", "/apis/serving.quire.dev/v1alpha1/llmdeployments")["items"]
    services = world.client.request("GET", "/api/v1/services?labelSelector=serving.quire.dev/name")["items"]
    late = [b for b in items if b["status"].get("observedGeneration") != b["metadata"]["generation"]]
    return len(items) == len(services) == SIZE and not late
