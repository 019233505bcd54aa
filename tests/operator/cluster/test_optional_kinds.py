"""A kind whose CRD may be absent is read on demand, and reported as missing when it is."""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.cluster import Cluster, Key, kinds
from quire_operator.observed import Ref
from quire_operator.plan import Plan
from tests.operator.cluster.test_cluster import MODEL, owner, thing
from tests.operator.fake_api import FakeApi, connected

GROUP = "/apis/keda.sh/v1alpha1"
ONE = f"{GROUP}/namespaces/ns/scaledobjects/m"
WANTED = Ref("ScaledObject", "m")


def scaled_object(uid: str = "so1", **metadata: Any) -> dict[str, Any]:
    return thing("ScaledObject", uid=uid, ownerReferences=owner(), **metadata)


async def test_a_missing_crd_is_distinguished_from_a_missing_object() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        absent = await cluster.observe(MODEL, [WANTED])
        api.put(GROUP, {"metadata": {}})
        empty = await cluster.observe(MODEL, [WANTED])
        api.put(ONE, scaled_object())
        there = await cluster.observe(MODEL, [WANTED])

    assert (absent.missing, absent.children) == ({"ScaledObject"}, {})
    assert (empty.missing, empty.children) == (frozenset(), {})
    assert (there.missing, set(there.children)) == (frozenset(), {WANTED})


async def test_an_object_of_an_unwatched_kind_is_read_by_every_reconcile_that_wants_it() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        cluster.cache.put(scaled_object("old"))
        api.put(ONE, {**scaled_object(), "spec": {"maxReplicaCount": 9}})
        observed = await cluster.observe(MODEL, [WANTED])
        del api.objects[ONE]
        gone = await cluster.observe(MODEL, [WANTED])
        unwanted = await cluster.observe(MODEL)

    assert observed.children[WANTED]["spec"] == {"maxReplicaCount": 9}
    assert gone.children == unwanted.children == {}


async def test_a_relist_after_the_crd_was_deleted_removes_its_objects_from_the_cache() -> None:
    api = FakeApi(answers={("GET", f"{GROUP}/scaledobjects"): (404, "404 page not found")})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        cluster.cache.put(scaled_object())
        changes = await cluster.relist(kinds.SCALED_OBJECT, ())

    assert changes.owners == {Key("ns", "m")}
    assert cluster.cache.get("ScaledObject", "ns", "m") is None


async def test_a_deleted_object_that_a_finalizer_keeps_is_observed_as_terminating() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        cluster.cache.put(api.put(ONE, scaled_object()))
        api.answers["DELETE", ONE] = (200, "it has a finalizer")
        api.put(ONE, scaled_object(deletionTimestamp="2026-01-01T00:00:00Z"))
        await cluster.execute(Plan(delete_first=((WANTED, "so1"),)), "ns")
        observed = await cluster.observe(MODEL)

    assert "deletionTimestamp" in observed.children[WANTED]["metadata"]


async def test_only_the_autoscaler_that_keda_made_from_our_scaled_object_is_not_foreign() -> None:
    def hpa(name: str, label: str, of: str) -> dict[str, Any]:
        made_by = [{"kind": "ScaledObject", "name": of, "uid": of, "controller": True}]
        labels = {names.LABEL_NAME: label} if label else {}
        body = thing("HorizontalPodAutoscaler", name, ownerReferences=made_by, labels=labels)
        return {**body, "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "m"}}}

    async with connected(FakeApi()) as connection:
        cluster = Cluster(connection, fence=lambda: None, instance="op")
        for body in (hpa("keda-hpa-m", "m", "m"), hpa("keda-hpa-x", "", "x"), hpa("same-name", "", "m")):
            cluster.cache.put(body)
        observed = await cluster.observe(MODEL)

    assert (
        observed.keda_autoscaler is not None and observed.keda_autoscaler["metadata"]["name"] == "keda-hpa-m"
    )
    assert {body["metadata"]["name"] for body in observed.foreign_autoscalers} == {"keda-hpa-x", "same-name"}
