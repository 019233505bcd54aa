"""The cache never returns to an older resource version, neither by a late event nor by a late list."""

from __future__ import annotations

import functools
from typing import Any

from quire_operator import names
from quire_operator.cluster import Cache, Changes, Key, owner_key
from quire_operator.cluster.cache import TOMBSTONE_SECONDS, Listing
from tests.operator.fake_api import unexpected

Body = dict[str, Any]


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


def autoscaler(target: str, *, kind: str = "Deployment", labels: Body | None = None) -> Body:
    body = thing("HorizontalPodAutoscaler", "theirs", labels=labels or {})
    return {**body, "spec": {"scaleTargetRef": {"kind": kind, "name": target}}}


def test_an_autoscaler_without_our_label_belongs_to_the_owner_of_its_scale_target() -> None:
    cache = Cache()
    cache.put(autoscaler("m"))
    labelled = autoscaler("other", labels={names.LABEL_NAME: "mine"})

    assert [body["metadata"]["name"] for body in cache.owned(Key("ns", "m"))] == ["theirs"]
    assert owner_key(labelled) == Key("ns", "mine")
    assert not list(cache.owned(Key("ns", "other")))


def test_managed_fields_are_reduced_to_the_managers_of_a_deployments_replicas() -> None:
    cache = Cache()
    owns = {"manager": "a", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}, "f:paused": {}}}}
    other = {"manager": "b", "operation": "Apply", "fieldsV1": {"f:spec": {"f:paused": {}}}}
    for kind in ("Deployment", "ReplicaSet"):
        cache.put(thing(kind, managedFields=[owns, other]))

    kept = cache.get("Deployment", "ns", "m")
    assert kept is not None
    reduced = {"f:spec": {"f:replicas": {}}}
    assert kept["metadata"]["managedFields"] == [{**owns, "fieldsV1": reduced}]
    assert "managedFields" not in (cache.get("ReplicaSet", "ns", "m") or {"metadata": ()})["metadata"]


def listed(cache: Cache, *bodies: Body, version: int) -> Changes:
    listing = Listing(cache, "Service", unexpected)
    listing.add(bodies, version)
    return listing.finish()


def test_an_older_resource_version_never_replaces_a_newer_one() -> None:
    cache = Cache()
    assert cache.put(thing("Service", version=5))
    assert not cache.put(thing("Service", version=5)), "our own write comes back as an event"
    assert not cache.put(thing("Service", version=4))
    assert cache.put(thing("Service", version=6))


def test_a_stale_list_does_not_restore_a_deleted_object() -> None:
    cache = Cache()
    cache.put(thing("Service", version=5))
    cache.remove(thing("Service", version=6))

    changes = listed(cache, thing("Service", version=5), version=5)

    assert cache.get("Service", "ns", "m") is None
    assert changes.missed == frozenset()


def test_tombstones_expire_and_reject_stale_objects_until_then() -> None:
    now = 0.0
    cache = Cache(clock=lambda: now)
    for version in range(1, 201):
        cache.put(thing("Service", version=version, uid=str(version)))
        cache.remove(thing("Service", version=version, uid=str(version)))
        now += TOMBSTONE_SECONDS / 100

    late = [n for n in range(1, 201) if not cache.put(thing("Service", version=n, uid=str(n)))]
    assert late == list(range(100, 201)), "and until then no late answer brings it back"


def test_an_object_that_regains_its_label_is_cached_again() -> None:
    cache = Cache()
    cache.put(thing("Service", version=5))
    cache.remove(thing("Service", version=6))  # how a watch with a label selector reports the loss

    assert cache.put(thing("Service", version=7))
    assert cache.get("Service", "ns", "m") is not None


def test_a_list_removes_absent_objects_unless_the_cached_version_is_newer() -> None:
    cache = Cache()
    cache.put(thing("Service", "old", version=5))
    cache.put(thing("Service", "new", version=9))

    changes = listed(cache, version=7)

    assert cache.get("Service", "ns", "old") is None
    assert cache.get("Service", "ns", "new") is not None
    assert (changes.removed, changes.owners) == (1, frozenset({Key("ns", "m")}))


def test_a_recreated_object_replaces_its_predecessor_and_survives_its_late_deletion_event() -> None:
    cache = Cache()
    cache.put(thing("Service", version=9, uid="a"))
    assert cache.put(thing("Service", version=12, uid="b"))
    cache.remove(thing("Service", version=10, uid="a"))

    found = cache.get("Service", "ns", "m")
    assert found is not None and found["metadata"]["uid"] == "b"


def test_an_object_whose_label_changed_moves_to_its_new_owner() -> None:
    cache = Cache()
    cache.put(thing("Service", version=1))
    cache.put(thing("Service", version=2, labels={names.LABEL_NAME: "other"}))

    assert list(cache.owned(Key("ns", "m"))) == []
    assert len(list(cache.owned(Key("ns", "other")))) == 1


def test_changed_returns_new_objects_and_those_newer_than_the_given_versions() -> None:
    cache = Cache()
    for name, version in (("same", 1), ("newer", 5), ("unseen", 2)):
        cache.put(thing("Pod", name, version=version))

    changed = cache.changed("Pod", {"Pod-same": 1, "Pod-newer": 4, "Pod-gone": 9})

    assert {body["metadata"]["name"] for body in changed} == {"newer", "unseen"}


def test_an_object_of_a_list_that_the_cache_cannot_take_is_reported_and_the_others_are_taken() -> None:
    cache, reported = Cache(), []
    listing = Listing(cache, "Service", lambda body, why: reported.append((body["metadata"]["name"], why)))

    too_deep = functools.reduce(lambda inner, _: [inner], range(9000), [])
    listing.add([{**thing("Service", "bad"), "spec": too_deep}, thing("Service", "good")], version=9)

    assert [name for name, why in reported] == ["bad"] and "RecursionError" in reported[0][1]
    assert cache.get("Service", "ns", "good") is not None
    assert listing.finish().owners == {Key("ns", "m")}


def test_what_shares_an_accelerator_is_found_by_its_pool_until_it_leaves() -> None:
    cache, pool = Cache(), Key("ns", "card")
    member = {**thing(names.KIND), "spec": {"sharing": {"pool": "card"}}}
    of_pod = {names.LABEL_NAME: "gone", names.LABEL_POOL: "card"}
    cache.put(member)
    cache.put(thing("Pod", "p", labels=of_pod))
    cache.put(thing("Service", labels=of_pod))
    assert [body["kind"] for body in cache.in_pool(pool)] == [names.KIND, "Pod"]
    assert cache.pool_of(Key("ns", "m")) == "card" and cache.has_pool(pool)
    assert cache.members(pool) == [Key("ns", "m")]

    cache.put({**thing(names.KIND, version=2), "spec": {"sharing": {"pool": "other"}}})
    assert [body["kind"] for body in cache.in_pool(pool)] == ["Pod"] and cache.members(pool) == []
    assert cache.pool_of(Key("ns", "m")) == "other"
    cache.remove(thing("Pod", "p", version=3))
    assert not cache.has_pool(pool) and not list(cache.in_pool(pool))
    cache.put({**thing(names.KIND, version=4), "spec": {"sharing": "card"}})
    assert cache.pool_of(Key("ns", "m")) == ""
