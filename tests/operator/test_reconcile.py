"""A reconcile writes what is needed once, reports it once, and sends no request when nothing has changed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from quire_operator import names
from quire_operator.cluster import Cluster, ConflictError, Key
from quire_operator.reconcile import Reconciler
from quire_operator.reports import Canary, Sample
from quire_operator.settings import Settings
from tests.operator.fake_api import FakeApi, connected

Body = dict[str, Any]

KEY = Key("ns", "m")
LLM = "/apis/serving.quire.dev/v1alpha1/namespaces/ns/llmdeployments/m"
SERVICE = "/api/v1/namespaces/ns/services/m"
SETTINGS = Settings(engine_image="engine:1")


def model(**spec: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **spec,
        },
    }


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def reconciling(api: FakeApi, clock: Clock | None = None) -> AsyncIterator[tuple[Reconciler, Cluster]]:
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        yield Reconciler(cluster, SETTINGS, clock=clock or Clock(), now=lambda: moment), cluster


async def test_a_new_llmdeployment_takes_one_write_per_child_and_one_status_patch(monkeypatch: Any) -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        first = api.writes()
        await reconcile(KEY)

    kinds_written = [path.split("/")[-2] for path in first[:-1]]
    assert kinds_written == [
        "controllerrevisions",
        "serviceaccounts",
        "configmaps",
        "networkpolicies",
        "services",
        "deployments",
    ]
    assert first[-1] == f"PATCH {LLM}/status"
    assert api.writes() == first, "the second look writes nothing"


async def test_a_reconcile_without_changes_sends_no_request() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        put_pod(api, cluster)
        await reconcile(KEY)
        api.requests.clear()
        result = await reconcile(KEY)

    assert api.requests == []
    assert not result.plan


async def test_a_deleted_or_terminating_llmdeployment_is_left_to_garbage_collection() -> None:
    api = FakeApi()
    going = model()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    async with reconciling(api) as (reconcile, cluster):
        await reconcile(KEY)
        cluster.cache.put(api.put(LLM, going))
        await reconcile(KEY)

    assert api.requests == []


async def test_an_invalid_spec_is_reported_in_the_status_and_one_event_and_writes_no_child() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model(engine={"env": [{"name": "QUIRE_FAULT", "value": "x"}]})))
        result = await reconcile(KEY)

    assert result.phase == "Failed"
    status, *others = api.writes()
    assert status == f"PATCH {LLM}/status"
    assert all("/events" in path for path in others), others
    assert [r.body["reason"] for r in api.requests if r.path.endswith("/events")] == ["InvalidSpec"]


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (403, "is forbidden: exceeded quota: q", "QuotaExceeded"),
        (422, "is invalid: spec.x", "ApplyRejected"),
        (500, "failed to allocate a serviceIP: range is full", "ApplyFailed"),
    ],
)
async def test_a_rejected_apply_is_reported_in_last_failure(code: int, message: str, reason: str) -> None:
    api = FakeApi(answers={("PATCH", SERVICE): (code, message)})
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        stored = cluster.cache.get(names.KIND, *KEY)

    assert stored is not None and stored["status"]["lastFailure"]["reason"] == reason
    assert message in stored["status"]["lastFailure"]["message"]


async def test_a_concurrent_change_is_a_conflict_and_not_overwritten() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        api.put(LLM, model(replicas=3))
        with pytest.raises(ConflictError):
            await reconcile(KEY)

    assert "status" not in api.objects[LLM]


async def test_a_failed_event_creation_neither_fails_nor_repeats_the_reconcile() -> None:
    api = FakeApi(answers={("POST", "/apis/events.k8s.io/v1/namespaces/ns/events"): (500, "down")})
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model(engine={"env": [{"name": "QUIRE_FAULT", "value": "x"}]})))
        await reconcile(KEY)
        api.requests.clear()
        await reconcile(KEY)

    assert api.requests == []


async def test_repeated_repairs_of_a_child_back_off() -> None:
    api, clock = FakeApi(), Clock()
    async with reconciling(api, clock) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        api.requests.clear()
        for _ in range(300):  # half a minute at ten edits per second
            clock.now += 0.1
            edited = {**api.objects[SERVICE], "spec": {"selector": {}}}
            cluster.cache.put(api.put(SERVICE, {**edited, "kind": "Service"}))
            result = await reconcile(KEY)
        assert len([path for path in api.writes() if path == f"PATCH {SERVICE}"]) <= 8

        assert result.requeue_after is not None
        clock.now += result.requeue_after
        await reconcile(KEY)

    assert api.objects[SERVICE]["spec"]["selector"], "it is mended as soon as it may be"


def pod() -> Iterator[Body]:
    """A ReplicaSet of the Deployment and a loading pod of it."""
    labels = {names.LABEL_NAME: "m"}
    owner = {"controller": True, "kind": "Deployment", "name": "m", "uid": "d1"}
    metadata = {"namespace": "ns", "labels": labels, "resourceVersion": "5"}
    yield {
        "kind": "ReplicaSet",
        "metadata": {**metadata, "name": "rs", "uid": "rs1", "ownerReferences": [owner]},
        "spec": {"template": {"spec": {"containers": []}}},
    }
    yield {
        "kind": "Pod",
        "metadata": {
            **metadata,
            "name": "p",
            "uid": "p1",
            "ownerReferences": [{**owner, "kind": "ReplicaSet", "uid": "rs1"}],
        },
        "spec": {"nodeName": "n", "containers": []},
        "status": {
            "containerStatuses": [
                {"name": "server", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
            ]
        },
    }


def put_pod(api: FakeApi, cluster: Cluster) -> None:
    """The fake gives uids of its own: the pods must follow the Deployment's."""
    uid = api.objects["/apis/apps/v1/namespaces/ns/deployments/m"]["metadata"]["uid"]
    for body in pod():
        for owner in body["metadata"]["ownerReferences"]:
            owner["uid"] = uid if owner["uid"] == "d1" else owner["uid"]
        cluster.cache.put(body)


async def test_load_progress_alone_is_written_every_ten_seconds_at_most() -> None:
    api, clock = FakeApi(), Clock()
    async with reconciling(api, clock) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        put_pod(api, cluster)
        await reconcile(KEY)
        api.requests.clear()
        waits = []
        for second in range(1, 31):
            clock.now += 1
            cluster.samples["p1"] = Sample(phase="loading", loaded_bytes=second, total_bytes=100)
            waits.append((await reconcile(KEY)).requeue_after)

    assert 3 <= len(api.writes()) <= 4
    assert all(wait is not None and wait <= 10 for wait in waits)


async def test_status_changes_within_a_second_are_merged_into_one_write_of_the_last_state() -> None:
    api, clock = FakeApi(), Clock()
    deployment = "/apis/apps/v1/namespaces/ns/deployments/m"
    async with reconciling(api, clock) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        api.requests.clear()
        live = api.objects[deployment]
        for replicas in (1, 2, 3):
            clock.now += 0.2
            cluster.cache.put(api.put(deployment, {**live, "status": {"replicas": replicas}}))
            result = await reconcile(KEY)
        assert api.writes() == []
        assert result.requeue_after is not None
        clock.now += result.requeue_after
        await reconcile(KEY)

    assert api.writes() == [f"PATCH {LLM}/status"]
    assert api.objects[LLM]["status"]["replicas"] == 3


async def test_a_status_that_keeps_changing_is_written_about_once_a_second() -> None:
    api, clock = FakeApi(), Clock()
    deployment = "/apis/apps/v1/namespaces/ns/deployments/m"
    async with reconciling(api, clock) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        live = api.objects[deployment]
        for turn in range(150):
            clock.now += 0.2
            status = {"replicas": 1 + turn % 2, "observedGeneration": 1}
            cluster.cache.put(api.put(deployment, {**live, "status": status}))
            result = await reconcile(KEY)
            last = api.objects[LLM]["status"]["replicas"]
        clock.now += result.requeue_after or 0
        await reconcile(KEY)

    assert 10 <= api.writes().count(f"PATCH {LLM}/status") <= 42
    assert last in (1, 2) and api.objects[LLM]["status"]["replicas"] == 2


async def test_a_revision_rendered_by_another_release_is_read_once_and_not_at_every_reconcile() -> None:
    api = FakeApi()
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        now = datetime(2026, 1, 1, tzinfo=UTC)
        newer = Reconciler(cluster, Settings(engine_image="engine:2"), clock=Clock(), now=lambda: now)
        for _ in range(3):
            await newer(KEY)

    asked = [one.path for one in api.requests if one.method == "GET" and "/controllerrevisions/" in one.path]
    assert len(asked) == 1
    assert "engine:1" in str(api.objects["/apis/apps/v1/namespaces/ns/deployments/m"])
    assert api.objects[LLM]["status"]["availableRenderRevision"], "the newer one is reported"


async def test_without_the_right_to_read_secrets_a_restricted_reference_is_missing_rights() -> None:
    secret = "/api/v1/namespaces/ns/secrets/keys"
    api = FakeApi(answers={("GET", secret): (403, "secrets is forbidden")})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        restricted = Settings(engine_image="engine:1", secret_references="Labelled")
        reconcile = Reconciler(
            cluster, restricted, clock=Clock(), now=lambda: datetime(2026, 1, 1, tzinfo=UTC)
        )
        cluster.cache.put(api.put(LLM, model(security={"apiKeysSecretRef": {"name": "keys"}})))
        await reconcile(KEY)
        stored = cluster.cache.get(names.KIND, *KEY)

    assert stored is not None and stored["status"]["lastFailure"]["reason"] == "MissingRights"
    assert "secrets is forbidden" in stored["status"]["lastFailure"]["message"]
    assert not [path for path in api.writes() if "/deployments/" in path]


async def test_a_restricted_reference_to_nothing_is_refused_like_one_without_its_label() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        restricted = Settings(engine_image="engine:1", secret_references="Labelled")
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        reconcile = Reconciler(cluster, restricted, clock=Clock(), now=lambda: moment)
        cluster.cache.put(api.put(LLM, model(security={"apiKeysSecretRef": {"name": "forgotten"}})))
        await reconcile(KEY)
        stored = cluster.cache.get(names.KIND, *KEY)

    assert stored is not None and stored["status"]["lastFailure"]["reason"] == "ReferenceRefused"
    assert "Secret forgotten" in stored["status"]["lastFailure"]["message"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, "is forbidden: exceeded quota: q, requested: count/configmaps=1"),
        (422, "is invalid: data: Forbidden: field is immutable when `immutable` is set"),
        (500, "etcdserver: request timed out"),
    ],
)
async def test_golden_tokens_that_cannot_be_kept_are_logged_and_are_no_failure_of_the_llmdeployment(
    code: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/api/v1/namespaces/ns/configmaps/{names.golden_tokens('m')}"
    api = FakeApi(answers={("GET", path): (404, "not found"), ("PATCH", path): (code, message)})
    async with reconciling(api) as (reconcile, cluster):
        cluster.cache.put(api.put(LLM, model()))
        await reconcile(KEY)
        put_pod(api, cluster)
        serving = cluster.cache.get("Pod", "ns", "p")
        assert serving is not None
        ready = {**serving["status"], "conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {**serving["metadata"], "resourceVersion": "6"}
        cluster.cache.put({**serving, "metadata": metadata, "status": ready})
        cluster.samples["p1"] = Sample(phase="serving", canary=Canary(fingerprint="a" * 64, tokens=(1, 2)))
        await reconcile(KEY)
        stored = cluster.cache.get(names.KIND, *KEY)

    assert f"PATCH {path}" in api.writes(), "it was not refused"
    assert stored is not None and "lastFailure" not in stored["status"]
    assert message in caplog.text
