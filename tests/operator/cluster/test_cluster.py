"""Requests and responses on the wire, the cache, and ownership of objects."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client.configuration import Configuration

from quire_operator import names
from quire_operator.cluster import (
    Cluster,
    ClusterError,
    ConflictError,
    Connection,
    FailedError,
    ForbiddenError,
    Key,
    NotFoundError,
    PredecessorError,
    QuotaExceededError,
    RejectedError,
    UnreachableError,
    kinds,
)
from quire_operator.cluster.connection import encode
from quire_operator.cluster.errors import from_answer
from quire_operator.lease import NotLeadingError
from quire_operator.observed import Ref
from quire_operator.plan import Plan, PodPatch
from quire_operator.status.transitions import Event
from tests.operator.fake_api import FakeApi, connected, unexpected

Body = dict[str, Any]

LLM = "/apis/serving.quire.dev/v1alpha1/namespaces/ns/llmdeployments/m"
SERVICE = "/api/v1/namespaces/ns/services/m"


def owner(uid: str = "u1", name: str = "m") -> list[Body]:
    return [{"kind": names.KIND, "name": name, "uid": uid, "controller": True}]


def thing(kind: str, name: str = "m", *, version: int = 1, uid: str = "", **metadata: Any) -> Body:
    return {
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": uid or f"{kind}-{name}",
            "resourceVersion": str(version),
            "labels": {names.LABEL_NAME: "m", names.LABEL_MANAGED_BY: names.MANAGED_BY},
            **metadata,
        },
    }


MODEL = thing(names.KIND, uid="u1", labels={})
MANIFEST = {"apiVersion": "v1", **thing("Service", ownerReferences=owner())}


def allowed() -> None:
    return None


async def test_an_autoscaler_in_delete_first_is_deleted_before_anything_is_applied() -> None:
    api = FakeApi()
    hpa = "/apis/autoscaling/v2/namespaces/ns/horizontalpodautoscalers/m"
    api.put(hpa, thing("HorizontalPodAutoscaler"))
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        gone = (Ref("HorizontalPodAutoscaler", "m"), "h1")
        await cluster.execute(Plan(apply=(MANIFEST,), delete_first=(gone,)), "ns")

    assert api.writes() == [f"DELETE {hpa}", f"PATCH {SERVICE}"]


async def test_an_apply_is_a_forced_server_side_apply_with_our_field_manager() -> None:
    api = FakeApi()
    async with connected(api, token="secret") as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.execute(Plan(apply=(MANIFEST,)), "ns")

    (request,) = api.requests
    assert (request.method, request.path) == ("PATCH", SERVICE)
    assert request.content_type == "application/apply-patch+yaml"
    assert request.query == {"fieldManager": "quire-operator", "force": "true"}
    assert request.body == MANIFEST
    assert request.authorization == "Bearer secret"
    assert cluster.cache.get("Service", "ns", "m") is not None, "the answer is in the cache already"


async def test_a_delete_has_a_uid_precondition_and_a_pod_patch_removes_annotations() -> None:
    api = FakeApi()
    pod = PodPatch(name="m-0", uid="p1", annotations={"a/b": None})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.execute(Plan(delete=((Ref("ConfigMap", "old"), "c1"),), pod_patches=(pod,)), "ns")

    delete, release = api.requests
    assert (delete.method, delete.path) == ("DELETE", "/api/v1/namespaces/ns/configmaps/old")
    assert delete.body["preconditions"] == {"uid": "c1"}
    assert release.content_type == "application/merge-patch+json"
    assert release.body == {"metadata": {"uid": "p1", "annotations": {"a/b": None}}}


async def test_a_process_that_does_not_lead_sends_no_write() -> None:
    def refuse() -> None:
        raise NotLeadingError("not leading")

    api = FakeApi()
    pod = PodPatch(name="m-0", uid="p1", annotations={"a/b": None})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=refuse, instance="op-1")
        for plan in (
            Plan(apply=(MANIFEST,)),
            Plan(delete=((Ref("Service", "m"), "x"),)),
            Plan(pod_patches=(pod,)),
        ):
            with pytest.raises(NotLeadingError):
                await cluster.execute(plan, "ns")
        with pytest.raises(NotLeadingError):
            await cluster.patch_status(MODEL, {"phase": "Serving"})
        with pytest.raises(NotLeadingError):
            await cluster.record_event(MODEL, Event(kind="Normal", reason="Ready", note=""))

    assert api.requests == []


async def test_the_status_is_written_as_one_conditional_merge_patch_of_the_subresource() -> None:
    api = FakeApi()
    stored = api.put(LLM, MODEL)
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.patch_status(stored, {"phase": "Serving"})
        with pytest.raises(ConflictError):
            await cluster.patch_status(stored, {"phase": "Pending"})
        await cluster.refresh(Key("ns", "m"))

    assert api.requests[0].path == f"{LLM}/status"
    assert api.requests[0].content_type == "application/merge-patch+json"
    cached = cluster.cache.get(names.KIND, "ns", "m")
    assert cached is not None and cached["status"]["phase"] == "Serving"


async def test_an_event_is_created_in_events_k8s_io_with_the_object_as_regarding() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.record_event(MODEL, Event(kind="Warning", reason="OOMKilled", note="n" * 2000))

    (request,) = api.requests
    assert request.path == "/apis/events.k8s.io/v1/namespaces/ns/events"
    assert request.body["regarding"]["uid"] == "u1"
    assert len(request.body["note"]) <= 1024


async def test_a_list_is_paginated_filtered_by_label_and_its_items_get_their_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeApi(page=2)
    for i in range(5):
        api.put(f"/api/v1/namespaces/ns/services/s{i}", thing("Service", f"s{i}"))
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        changes = await cluster.relist(kinds.BY_NAME["Service"], ["ns"])

    assert len(changes.missed) == 5
    assert len(api.requests) == 3
    assert {r.query["labelSelector"] for r in api.requests} == {names.LABEL_NAME}
    assert len(list(cluster.cache.owned(Key("ns", "m")))) == 5


async def observe(api: FakeApi, *cached: Body, wanted: tuple[Ref, ...] = (Ref("Service", "m"),)) -> Any:
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        for body in cached:
            cluster.cache.put(body)
        return await cluster.observe(MODEL, wanted)


async def test_cached_objects_are_observed_without_a_request() -> None:
    api = FakeApi()
    deployment = thing("Deployment", ownerReferences=owner())
    replica_set = thing("ReplicaSet", "rs", ownerReferences=owner("Deployment-m"))
    pod = thing("Pod", "p", ownerReferences=owner("ReplicaSet-rs"))
    stray = thing("Pod", "stray", ownerReferences=owner("another"))

    seen = await observe(api, deployment, replica_set, pod, stray, wanted=(Ref("Deployment", "m"),))

    assert api.requests == []
    assert list(seen.children) == [Ref("Deployment", "m")]
    assert [p["metadata"]["name"] for p in seen.pods] == ["p"]


async def test_an_object_without_our_owner_reference_is_foreign_even_with_our_label() -> None:
    for metadata in ({"labels": {}}, {"ownerReferences": owner("u2", "other")}, {}):
        api = FakeApi()
        api.put(SERVICE, thing("Service", **metadata))  # type: ignore[arg-type]  # metadata of several types

        seen = await observe(api)

        assert seen.foreign == (Ref("Service", "m"),)
        assert seen.children == {}


async def test_an_orphan_with_our_applied_hash_counts_as_a_child() -> None:
    api = FakeApi()
    api.put(SERVICE, thing("Service", annotations={names.ANNOTATION_APPLIED_HASH: "x"}))

    seen = await observe(api)

    assert list(seen.children) == [Ref("Service", "m")]


async def test_a_child_of_a_deleted_owner_with_the_same_name_raises_a_predecessor_error() -> None:
    api = FakeApi()
    api.put(SERVICE, thing("Service", ownerReferences=owner("old-uid")))

    with pytest.raises(PredecessorError):
        await observe(api)


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (404, "", NotFoundError),
        (409, "", ConflictError),
        (403, "x is forbidden: exceeded quota: q", QuotaExceededError),
        (403, "x is forbidden: User cannot", ForbiddenError),
        (422, "spec.x: Invalid value", RejectedError),
        (401, "", UnreachableError),
        (429, "", UnreachableError),
        (500, "", FailedError),
        (503, "", UnreachableError),
    ],
)
async def test_an_error_response_raises_the_matching_error_class(
    status: int, message: str, error: type[Exception]
) -> None:
    api = FakeApi(answers={("GET", "/x"): (status, message)})
    async with connected(api) as connection:
        with pytest.raises(error, match=message or None):
            await connection.request("GET", "/x")
    assert type(from_answer(status, message)) is error


async def test_a_refused_connection_raises_an_unreachable_error() -> None:
    async with connected(FakeApi()) as connection:
        connection._configuration.host = "http://127.0.0.1:9"
        with pytest.raises(UnreachableError):
            await connection.request("GET", "/x")


@given(st.text(st.characters(codec="utf-8"), max_size=50))
def test_an_encoded_body_parses_identically_as_json_and_as_yaml(text: str) -> None:
    raw = encode({"text": text})

    assert json.loads(raw) == {"text": text}
    assert yaml.safe_load(raw) == {"text": text}


EVENTS = "/apis/events.k8s.io/v1/namespaces/ns/events"


async def test_failed_create_events_are_read_only_for_an_unfinished_job_that_still_lacks_a_pod() -> None:
    def job(uid: str, made: str, **fields: Any) -> Body:
        return {**thing("Job", uid=uid, ownerReferences=owner(), creationTimestamp=made), **fields}

    done = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    old, new = "2026-01-01T00:00:00Z", datetime.now(UTC).isoformat()
    api = FakeApi()
    api.put(f"{EVENTS}/e", {"metadata": {"name": "e"}, "note": "exceeded quota: q"})
    jobs = {"waits": job("j1", old), "young": job("j2", new), "done": job("j3", old, **done)}
    reported = {}
    async with connected(api) as connection:
        for name, body in jobs.items():
            cluster = Cluster(connection, fence=lambda: None, instance="op")
            cluster.cache.put(body)
            reported[name] = (await cluster.observe(MODEL)).job_error

    assert reported == {"waits": "exceeded quota: q", "young": "", "done": ""}
    asked = [request.query["fieldSelector"] for request in api.requests if request.path == EVENTS]
    assert asked == ["regarding.uid=j1,reason=FailedCreate"]


async def test_an_answer_that_is_no_json_is_an_error_with_the_status_of_http() -> None:
    """As of a proxy between the operator and the API server."""

    async def say(_: web.Request) -> web.Response:
        return web.Response(status=502, reason="Bad Gateway", text="<html>nobody is at home</html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", say)
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        connection = Connection(configuration, None, report=unexpected)
        with pytest.raises(UnreachableError, match="Bad Gateway"):
            await connection.request("GET", SERVICE)
        await connection.close()


@pytest.mark.parametrize("text", ["", "clusters: []"])
async def test_credentials_that_cannot_be_used_are_one_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(ClusterError, match="no credentials for the API server"):
        await Connection.open(report=unexpected)
