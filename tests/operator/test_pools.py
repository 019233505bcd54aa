"""LLMDeployments that share an accelerator are reconciled so that no two of them run, whatever comes
between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from quire_operator import names
from quire_operator.cluster import Cluster, Key
from quire_operator.controller import WORKERS, Controller
from quire_operator.metrics import Metrics
from quire_operator.reconcile import Reconciler
from quire_operator.settings import Settings
from tests.operator.fake_api import FakeApi, connected

Body = dict[str, Any]

A, B, C = (Key("ns", name) for name in "abc")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
STOPPED: Body = {"spec": {"replicas": 0}}
SETTINGS = Settings(engine_image="engine:1", gateway_namespaces=("ns",))


def path(key: Key) -> str:
    return f"/apis/serving.quire.dev/v1alpha1/namespaces/ns/llmdeployments/{key.name}"


def deployment(key: Key) -> str:
    return f"/apis/apps/v1/namespaces/ns/deployments/{key.name}"


def model(key: Key, **spec: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": key.name, "namespace": "ns", "uid": f"u-{key.name}", "generation": 1},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            "sharing": {"pool": "card"},
            **spec,
        },
    }


@dataclass
class SlowApi(FakeApi):
    """Answers a write to `slow` only once `go` is set. `most`: how many of `A` and `B` ran at once."""

    slow: str = ""
    most: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "PATCH" and request.path == self.slow:
            self.begun.set()
            await self.go.wait()
        answer = await super().handle(request)
        self.most = max(self.most, len(running(self, A, B)))
        return answer


@asynccontextmanager
async def pool(
    api: FakeApi, *keys: Key, now: Callable[[], datetime] = lambda: NOW
) -> AsyncIterator[tuple[Reconciler, Cluster]]:
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        for key in keys:
            cluster.cache.put(api.put(path(key), model(key)))
        yield Reconciler(cluster, SETTINGS, now=now, clock=lambda: now().timestamp()), cluster


def running(api: FakeApi, *keys: Key) -> list[str]:
    return [key.name for key in keys if api.objects.get(deployment(key), STOPPED)["spec"]["replicas"]]


def reconciles(metrics: Metrics) -> float:
    samples = (sample for found in metrics.registry.collect() for sample in found.samples)
    return sum(one.value for one in samples if one.name == "quire_operator_reconcile_total")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)  # what is waited for is a request that the fake has answered


def ask(cluster: Cluster, key: Key, at: datetime = NOW) -> None:
    cluster.demands[key] = cluster.waits[key] = at.timestamp()


async def test_of_several_that_are_new_one_runs() -> None:
    api = FakeApi()
    async with pool(api, A, B, C) as (reconcile, _):
        results = [await reconcile(key) for key in (C, B, A)]
        assert running(api, A, B, C) == ["a"]
    assert [result.phase for result in results] == ["Idle", "Idle", "Pending"]
    assert all(set(result.others) <= {A, B, C} for result in results)


async def test_one_that_is_deleted_or_asked_for_makes_the_others_be_looked_at() -> None:
    api = FakeApi()
    async with pool(api, A, B) as (reconcile, cluster):
        first = await reconcile(A)
        assert first.others == (B,), "b has to say whose turn it is"
        await reconcile(B)
        assert (await reconcile(A)).others == ()
        cluster.cache.put(api.put(path(A), model(A, suspend=True)))
        ask(cluster, B)
        asked = await reconcile(B)
        assert asked.others == (A,) and running(api, B) == []
        await reconcile(A)
        assert running(api, A, B) == []
        assert asked.requeue_after is not None, "it looks again whether the pods are gone"


async def test_while_one_is_started_no_other_one_decides_that_it_may_start() -> None:
    api = SlowApi(slow=deployment(A))
    async with pool(api) as (_, cluster):
        controller = Controller(cluster, SETTINGS, Metrics())
        work = asyncio.create_task(controller.run())
        controller.on_event("ADDED", api.put(path(A), model(A)))
        await api.begun.wait()
        controller.on_event("MODIFIED", api.put(path(A), model(A, suspend=True)))
        controller.on_event("ADDED", api.put(path(B), model(B)))
        controller.on_event("ADDED", api.put(path(C), unshared(model(C))))
        await until(lambda: running(api, C) == ["c"])  # b would have been started beside it
        api.go.set()
        await until(lambda: deployment(A) in api.objects and running(api, A, B) == ["b"])
        work.cancel()
    assert api.most == 1, "a was started on the way, so b waits until it is stopped"


async def test_a_pool_of_many_members_leaves_the_workers_to_other_models() -> None:
    api = SlowApi(slow=deployment(A))
    many = [Key("ns", f"b{index}") for index in range(2 * WORKERS)]
    async with pool(api) as (_, cluster):
        controller = Controller(cluster, SETTINGS, Metrics())
        work = asyncio.create_task(controller.run())
        controller.on_event("ADDED", api.put(path(A), model(A)))
        await api.begun.wait()
        for key in many:
            controller.on_event("ADDED", api.put(path(key), model(key)))
        controller.on_event("ADDED", api.put(path(C), unshared(model(C))))
        await until(lambda: running(api, C) == ["c"])
        assert not any(deployment(key) in api.objects for key in many), "they wait for a"
        api.go.set()
        await until(lambda: all(deployment(key) in api.objects for key in many))
        work.cancel()
    assert running(api, A, *many) == ["a"]


async def test_one_that_did_not_become_ready_stops_and_says_until_when_the_others_come_first() -> None:
    api, times = FakeApi(), [NOW]
    async with pool(api, A, B, now=lambda: times[0]) as (reconcile, cluster):
        for key in (A, B):
            await reconcile(key)
        assert running(api, A, B) == ["a"]
        times[0] = over = NOW + timedelta(seconds=1800)
        ask(cluster, A, over)
        ask(cluster, B, over)
        for key in (B, A):
            await reconcile(key)
        assert running(api, A, B) == []
    (ready,) = [one for one in api.objects[path(A)]["status"]["conditions"] if one["type"] == "Ready"]
    assert ready["reason"] == "Waiting"
    assert "the others come first until 2026-01-01T01:00:00Z" in ready["message"]


def deleted(body: Body) -> Body:
    return {**body, "metadata": {**body["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}


def moved(body: Body) -> Body:
    return {**body, "spec": {**body["spec"], "sharing": {"pool": "other"}}}


def unshared(body: Body) -> Body:
    return {**body, "spec": {key: value for key, value in body["spec"].items() if key != "sharing"}}


@pytest.mark.parametrize("change", [deleted, moved, unshared])
async def test_the_pool_is_looked_at_when_the_one_that_has_the_turn_leaves_it(change: Any) -> None:
    api = FakeApi()
    async with pool(api, A, B, C) as (reconcile, cluster):
        for key in (A, B, C):
            await reconcile(key)
        assert (await reconcile(A)).others == (), "while it is there they are left alone"
        cluster.cache.put(api.put(path(A), change(api.objects[path(A)])))
        assert set((await reconcile(A)).others) == {B, C}
        await reconcile(B)
        assert not set((await reconcile(A)).others), "the turn is that of another one"


async def test_another_one_runs_as_soon_as_the_one_that_has_the_accelerator_is_deleted() -> None:
    api = FakeApi()
    async with pool(api) as (_, cluster):
        controller = Controller(cluster, SETTINGS, metrics := Metrics())
        work = asyncio.create_task(controller.run())
        for key in (A, B):
            controller.on_event("ADDED", api.put(path(key), model(key)))
        await until(lambda: reconciles(metrics) >= 3)  # b a second time, to say whose turn it is
        assert running(api, A, B) == ["a"]
        controller.on_event("DELETED", api.objects[path(A)])
        await until(lambda: running(api, B) == ["b"])
        work.cancel()


@pytest.mark.parametrize("spec", [{"engine": {"nonsense": 1}}, {"replicas": 2}])
async def test_one_whose_spec_is_not_valid_has_no_turn(spec: Body) -> None:
    api = FakeApi()
    async with pool(api, B) as (reconcile, cluster):
        cluster.cache.put(api.put(path(A), model(A, **spec)))
        await reconcile(A)
        await reconcile(B)
        assert running(api, B) == ["b"]


async def test_one_that_cannot_be_applied_any_more_serves_until_another_is_asked_for_and_then_stops() -> None:
    api = FakeApi()
    async with pool(api, A, B) as (reconcile, cluster):
        await reconcile(A)
        await reconcile(B)
        assert running(api, A, B) == ["a"]
        cluster.cache.put(api.put(path(A), model(A, engine={"nonsense": 1})))
        await reconcile(A)
        await reconcile(B)
        assert running(api, A, B) == ["a"], "a mistake in a spec stops no model that serves"
        ask(cluster, B)
        assert (await reconcile(B)).others == (A,)
        await reconcile(A)
        assert running(api, A, B) == [], "it makes room, though nothing of it can be applied"
