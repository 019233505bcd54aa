"""Events cause reconciles, the results of our own writes do not, and a watch that delivers no events is
detected.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire_operator import names, spec
from quire_operator.cluster import Cluster, kinds, owner_key
from quire_operator.controller import Controller
from quire_operator.metrics import Metrics
from quire_operator.settings import Settings
from tests.operator.fake_api import FakeApi, connected

Body = dict[str, Any]

LLM = "/apis/serving.quire.dev/v1alpha1/namespaces/ns/llmdeployments/m"
SETTINGS = Settings(engine_image="engine:1")


def model(**fields: Any) -> Body:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "m", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": {
            "model": {"source": {"pvc": {"claimName": "models"}}},
            "resources": {"cpu": "1", "memory": "2Gi"},
            **fields,
        },
    }


@asynccontextmanager
async def controlling(api: FakeApi) -> AsyncIterator[tuple[Controller, Cluster, Metrics]]:
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        metrics = Metrics()
        yield Controller(cluster, SETTINGS, metrics), cluster, metrics


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_event_causes_a_reconcile_and_events_of_our_own_writes_cause_none() -> None:
    api = FakeApi()
    async with controlling(api) as (controller, cluster, metrics):
        work = asyncio.create_task(controller.run())
        controller.on_event("ADDED", api.put(LLM, model()))
        await until(lambda: f"PATCH {LLM}/status" in api.writes())
        total = "quire_operator_reconcile_total", {"result": "changed"}
        await until(lambda: metrics.registry.get_sample_value(*total))
        done = metrics.registry.get_sample_value(*total)
        for path, body in list(api.objects.items()):
            if "/events" not in path:
                controller.on_event("MODIFIED", body)
        assert metrics.registry.get_sample_value("quire_operator_queue_depth") == 0
        work.cancel()

    assert done == 1


async def test_a_watch_that_misses_an_object_in_two_relists_makes_the_process_unhealthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_operator.controller.EVENT_LATENCY_SECONDS", 1e-9)
    api = FakeApi()
    async with controlling(api) as (controller, _, _metrics):
        await controller.prime()
        assert controller.health() == ""
        api.put("/apis/serving.quire.dev/v1alpha1/llmdeployments/m", model())
        await controller._resync()
        assert controller.health() == "", "the event may be on its way"
        await controller._resync()
        assert "LLMDeployment" in controller.health()

        controller.on_event("MODIFIED", api.objects["/apis/serving.quire.dev/v1alpha1/llmdeployments/m"])
        assert controller.health() == ""


async def test_a_relist_repairs_a_missed_deletion_without_reporting_the_watch_stale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_operator.controller.EVENT_LATENCY_SECONDS", 1e-9)
    api = FakeApi()
    path = "/apis/serving.quire.dev/v1alpha1/llmdeployments/m"
    async with controlling(api) as (controller, cluster, _):
        controller.on_event("ADDED", api.put(path, model()))
        del api.objects[path]
        api.version += 1
        await controller._resync()
        await controller._resync()

        assert cluster.cache.llm_deployments() == []
        assert controller.health() == ""


async def test_a_repeated_initial_list_of_a_watch_causes_an_immediate_relist() -> None:
    """Of what was deleted between its two lists, kopf reports nothing."""
    api = FakeApi()
    path = "/apis/serving.quire.dev/v1alpha1/llmdeployments"
    async with controlling(api) as (controller, cluster, metrics):
        kept, gone = api.put(f"{path}/m", model()), model()
        gone["metadata"] |= {"name": "gone", "uid": "u2"}
        for body in (kept, api.put(f"{path}/gone", gone)):
            controller.on_event(None, body)
        work = asyncio.create_task(controller.run())
        del api.objects[f"{path}/gone"]
        api.version += 1
        await asyncio.sleep(0)
        assert len(cluster.cache.llm_deployments()) == 2 and not controller._interrupted.is_set()

        controller.on_event(None, kept)
        await until(
            lambda: metrics.registry.get_sample_value("quire_operator_resync_total", {"result": "ok"})
        )
        work.cancel()

    assert [key.name for key in cluster.cache.llm_deployments()] == ["m"]


JOBS = "/apis/batch/v1/jobs"
NO_JOBS = 'jobs.batch is forbidden: User "op" cannot list resource "jobs"'
RULE = 'apiGroups: ["batch"], resources: [jobs], verbs: [get, list, watch, create, patch, delete]'
CACHE = {"mode": "SharedPVC", "size": "1Gi"}
DOWNLOADED = {"model": {"source": {"huggingFace": {"repo": "org/m"}}}, "cache": CACHE}


def ready(api: FakeApi, path: str) -> Body:
    return next(c for c in api.objects[path]["status"]["conditions"] if c["type"] == "Ready")


async def test_without_an_optional_permission_others_are_reconciled_and_the_rule_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi(answers={("GET", JOBS): (403, NO_JOBS)})
    async with controlling(api) as (controller, _, _metrics):
        api.put("/apis/serving.quire.dev/v1alpha1/llmdeployments/m", model())
        for _ in range(3):
            async with asyncio.timeout(60):
                await controller.prime()
        work = asyncio.create_task(controller.run())
        await until(lambda: f"PATCH {LLM}/status" in api.writes())
        assert controller.health() == ""
        work.cancel()

    assert "PATCH /apis/apps/v1/namespaces/ns/deployments/m" in api.writes()
    reported = [record.getMessage() for record in caplog.records if "Job" in record.getMessage()]
    assert len(reported) == 1 and RULE in reported[0]


async def test_an_llmdeployment_with_missing_rights_is_reported_and_reconciled_once_they_are_granted() -> (
    None
):
    api = FakeApi(answers={("GET", JOBS): (403, NO_JOBS)})
    job_answers = api.answers
    async with controlling(api) as (controller, cluster, _):
        await controller.prime()
        work = asyncio.create_task(controller.run())
        body = api.put(LLM, model(**DOWNLOADED))
        name = spec.parse(body).download_name
        job_answers["GET", f"/apis/batch/v1/namespaces/ns/jobs/{name}"] = (403, NO_JOBS)
        controller.on_event("ADDED", body)
        await until(lambda: [r for r in api.requests if r.path.endswith("/events")])
        first = ready(api, LLM)
        assert not [path for path in api.writes() if "/jobs/" in path or "/deployments/" in path]
        assert [r.body["reason"] for r in api.requests if r.path.endswith("/events")] == ["MissingRights"]

        job_answers.clear()
        controller._queue.add(owner_key(body))
        await until(lambda: f"PATCH /apis/batch/v1/namespaces/ns/jobs/{name}" in api.writes())
        await until(lambda: ready(api, LLM)["reason"] != "MissingRights")
        work.cancel()

    assert (first["status"], first["reason"]) == ("False", "MissingRights")
    assert RULE in first["message"]
    assert controller.health() == ""


async def test_the_ready_metric_exists_only_while_the_llmdeployment_exists_and_is_not_suspended() -> None:
    api = FakeApi()
    async with controlling(api) as (controller, _, metrics):

        def reported() -> float | None:
            labels = {"namespace": "ns", "llmdeployment": "m"}
            return metrics.registry.get_sample_value("quire_llmdeployment_ready", labels)

        work = asyncio.create_task(controller.run())
        controller.on_event("ADDED", api.put(LLM, model()))
        await until(lambda: reported() == 0)
        deployment = "/apis/apps/v1/namespaces/ns/deployments/m"
        numbers = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
        live = api.objects[deployment]
        controller.on_event(
            "MODIFIED", api.put(deployment, {**live, "status": {**numbers, "observedGeneration": 9}})
        )
        await until(lambda: reported() == 1)
        body = api.objects[LLM]
        controller.on_event("MODIFIED", api.put(LLM, {**body, "spec": {**body["spec"], "suspend": True}}))
        await until(lambda: reported() is None)
        controller.on_event("MODIFIED", api.put(LLM, {**api.objects[LLM], "spec": body["spec"]}))
        await until(lambda: reported() is not None)
        api.version += 1
        controller.on_event("DELETED", api.objects[LLM])
        await until(lambda: reported() is None)
        work.cancel()


async def test_without_a_required_permission_priming_waits_and_the_rule_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi(answers={("GET", "/api/v1/pods"): (403, "pods is forbidden")})
    async with controlling(api) as (controller, _, _metrics):
        priming = asyncio.create_task(controller.prime())
        await until(lambda: "cannot list yet" in caplog.text)
        assert not priming.done()
        api.answers.clear()
        async with asyncio.timeout(60):
            await priming

    assert 'apiGroups: [""], resources: [pods], verbs: [get, list, watch, patch, delete]' in caplog.text


async def test_one_object_that_makes_reconcile_fail_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi()
    broken = model()
    broken["metadata"]["name"] = "broken"
    async with controlling(api) as (controller, _, metrics):
        work = asyncio.create_task(controller.run())
        body = api.put(LLM.replace("/m", "/broken"), broken)
        controller.on_event("ADDED", {**body, "metadata": {**body["metadata"], "generation": "no number"}})
        controller.on_event("ADDED", api.put(LLM, model()))
        await until(lambda: f"PATCH {LLM}/status" in api.writes())
        value = metrics.registry.get_sample_value("quire_operator_reconcile_total", {"result": "bug"})
        work.cancel()

    assert value == 1
    assert "unexpected" in caplog.text


def test_every_cached_kind_is_watched_except_optional_kinds_and_controller_revisions() -> None:
    unwatched = {kind.kind for kind in kinds.CACHED} - {kind.kind for kind in kinds.WATCHED}
    optional = {"HTTPRoute", "InferencePool", "LeaderWorkerSet", "ScaledObject"}
    assert unwatched == {"ControllerRevision", *optional}


async def test_an_event_about_an_object_that_cannot_be_read_is_reported_and_concerns_it_alone() -> None:
    async with controlling(FakeApi()) as (controller, cluster, _):
        reported: list[str] = []
        cluster.report = lambda body, why: reported.append(f"{body['metadata']['name']}: {why}")
        bad = {**model(), "metadata": {**model()["metadata"], "name": "bad"}}
        bad["spec"] = functools.reduce(lambda inner, _: [inner], range(9000), [])  # too deep for json
        controller.on_event("MODIFIED", bad)
        controller.on_event("ADDED", {**model(), "metadata": {**model()["metadata"], "resourceVersion": "7"}})

        assert len(reported) == 1 and reported[0].startswith("bad: RecursionError")
        assert [key.name for key in cluster.cache.llm_deployments()] == ["m"]


async def test_an_object_that_another_client_wrote_meanwhile_is_read_again_and_reconciled() -> None:
    api = FakeApi()
    async with controlling(api) as (controller, _, metrics):
        work = asyncio.create_task(controller.run())
        known = api.put(LLM, model())
        api.put(LLM, model(replicas=3))  # the watch has not told yet
        controller.on_event("ADDED", known)
        await until(lambda: "status" in api.objects[LLM])
        conflicts = metrics.registry.get_sample_value(
            "quire_operator_reconcile_total", {"result": "conflict"}
        )
        work.cancel()

    assert conflicts == 1
    assert api.objects[LLM]["spec"]["replicas"] == 3


async def test_after_a_conflict_an_object_that_cannot_be_read_again_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = FakeApi()
    async with controlling(api) as (controller, _, _metrics):
        work = asyncio.create_task(controller.run())
        known = api.put(LLM, model())
        api.put(LLM, model(replicas=3))
        api.answers["GET", LLM] = (500, "the database is gone")
        controller.on_event("ADDED", known)
        await until(lambda: "the database is gone" in caplog.text)
        assert "status" not in api.objects[LLM]
        api.answers.clear()
        await until(lambda: "status" in api.objects[LLM])
        work.cancel()


async def test_everything_is_listed_again_periodically_and_also_after_a_list_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire_operator.controller.CONFIRM_SECONDS", 0.01)
    api = FakeApi(answers={("GET", "/api/v1/pods"): (500, "the database is gone")})
    async with connected(api) as connection:
        cluster, metrics = Cluster(connection, fence=lambda: None, instance="op"), Metrics()
        often = Settings(engine_image="engine:1", resync_seconds=0)
        controller = Controller(cluster, often, metrics)

        def resyncs(result: str) -> float:
            return metrics.registry.get_sample_value("quire_operator_resync_total", {"result": result}) or 0

        work = asyncio.create_task(controller.run())
        await until(lambda: resyncs("error") >= 2)
        assert "re-list failed, will be tried again" in caplog.text
        api.answers.clear()
        await until(lambda: resyncs("ok") >= 2)
        work.cancel()
