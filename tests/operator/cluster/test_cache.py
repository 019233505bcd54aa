"""The cache never goes back in time, neither by a late event nor by a late list."""

from __future__ import annotations

from typing import Any

from quire_operator import names
from quire_operator.cluster import Cache, Changes, Key, owner_key
from quire_operator.cluster.cache import TOMBSTONE_SECONDS, Listing

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


def test_an_autoscaler_without_our_label_belongs_to_whom_it_scales() -> None:
    cache = Cache()
    cache.put(autoscaler("m"))
    labelled = autoscaler("other", labels={names.LABEL_NAME: "mine"})

    assert [body["metadata"]["name"] for body in cache.owned(Key("ns", "m"))] == ["theirs"]
    assert owner_key(labelled) == Key("ns", "mine")
    assert not list(cache.owned(Key("ns", "other")))


def test_of_managed_fields_only_the_owners_of_a_deployments_replicas_are_kept() -> None:
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
    listing = Listing(cache, "Service")
    listing.add(bodies, version)
    return listing.finish()


def test_an_older_version_never_replaces_a_newer_one() -> None:
    cache = Cache()
    assert cache.put(thing("Service", version=5))
    assert not cache.put(thing("Service", version=5)), "our own write comes back as an event"
    assert not cache.put(thing("Service", version=4))
    assert cache.put(thing("Service", version=6))


def test_a_deleted_object_does_not_rise_again_from_a_late_list() -> None:
    cache = Cache()
    cache.put(thing("Service", version=5))
    cache.remove(thing("Service", version=6))

    changes = listed(cache, thing("Service", version=5), version=5)

    assert cache.get("Service", "ns", "m") is None
    assert changes.missed == frozenset()


def test_what_is_deleted_again_and_again_takes_no_room_for_longer_than_an_answer_may_take() -> None:
    now = 0.0
    cache = Cache(clock=lambda: now)
    for version in range(1, 201):
        cache.put(thing("Service", version=version, uid=str(version)))
        cache.remove(thing("Service", version=version, uid=str(version)))
        now += TOMBSTONE_SECONDS / 100

    late = [n for n in range(1, 201) if not cache.put(thing("Service", version=n, uid=str(n)))]
    assert late == list(range(100, 201)), "and until then no late answer brings it back"


def test_an_object_that_lost_its_label_and_has_it_again_is_known_again() -> None:
    cache = Cache()
    cache.put(thing("Service", version=5))
    cache.remove(thing("Service", version=6))  # how a watch with a label selector reports the loss

    assert cache.put(thing("Service", version=7))
    assert cache.get("Service", "ns", "m") is not None


def test_a_list_removes_what_it_does_not_have_unless_that_is_newer() -> None:
    cache = Cache()
    cache.put(thing("Service", "old", version=5))
    cache.put(thing("Service", "new", version=9))

    changes = listed(cache, version=7)

    assert cache.get("Service", "ns", "old") is None
    assert cache.get("Service", "ns", "new") is not None
    assert (changes.removed, changes.owners) == (1, frozenset({Key("ns", "m")}))


def test_a_namesake_with_another_uid_replaces_the_object_it_follows() -> None:
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


def test_only_what_changed_since_it_was_seen_is_read_again() -> None:
    cache = Cache()
    for name, version in (("same", 1), ("newer", 5), ("unseen", 2)):
        cache.put(thing("Pod", name, version=version))

    changed = cache.changed("Pod", {"Pod-same": 1, "Pod-newer": 4, "Pod-gone": 9})

    assert {body["metadata"]["name"] for body in changed} == {"newer", "unseen"}
