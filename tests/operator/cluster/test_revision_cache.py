"""The data of a ControllerRevision is read once while it is needed, and dropped with it."""

from __future__ import annotations

from quire_operator.cluster import Cluster, Key, kinds
from quire_operator.cluster.revision_cache import RevisionCache
from quire_operator.observed import Ref
from quire_operator.plan import Plan
from tests.operator.cluster.test_cluster import MODEL, allowed, owner, thing
from tests.operator.fake_api import FakeApi, connected

REVISIONS = "/apis/apps/v1/namespaces/ns/controllerrevisions"


ONE, OTHER = Key("ns", "one"), Key("ns", "other")


def test_what_a_revision_kept_is_forgotten_with_it_and_all_else_stays() -> None:
    renders = RevisionCache()
    renders.put(ONE, "old", {"image": "a"})
    renders.put(ONE, "new", {"image": "b"})
    renders.keep({"new": 7})

    assert renders.get(ONE, "old") is None
    assert renders.get(ONE, "new") == {"image": "b"}


def test_a_long_history_takes_no_more_room_than_what_is_asked_for_of_it() -> None:
    renders = RevisionCache()
    renders.put(OTHER, "only", {"image": "o"})
    renders.put(ONE, "back", {"image": "1"})
    for number in range(2, 9):
        assert renders.get(ONE, "back"), "where a failed rollout went back to is asked for at every look"
        renders.put(ONE, f"r{number}", {"image": str(number)})

    left = [uid for uid in ("back", *(f"r{number}" for number in range(2, 9))) if renders.get(ONE, uid)]
    assert left == ["back", "r8"]
    assert renders.get(OTHER, "only"), "each has its own"


async def test_a_list_of_revisions_costs_no_second_read_at_those_that_are_left() -> None:
    api = FakeApi()
    for name in ("old", "new"):
        api.put(f"{REVISIONS}/{name}", {**thing("ControllerRevision", name), "data": {"of": name}})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.relist(kinds.REVISION, ["ns"])
        assert [await cluster.revision_data("ns", name) for name in ("old", "new")] == [
            {"of": "old"},
            {"of": "new"},
        ]
        del api.objects[f"{REVISIONS}/old"]
        await cluster.relist(kinds.REVISION, ["ns"])
        asked = len(api.requests)

        assert await cluster.revision_data("ns", "new") == {"of": "new"}
        assert len(api.requests) == asked
        assert await cluster.revision_data("ns", "old") is None


async def test_a_revision_that_is_deleted_is_out_of_the_history_at_once_without_a_watch() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        for name in ("old", "new"):
            revision = thing("ControllerRevision", name, uid=name, ownerReferences=owner())
            cluster.cache.put(api.put(f"{REVISIONS}/{name}", revision))
        assert len(cluster.revisions(MODEL)) == 2
        await cluster.execute(Plan(delete=((Ref("ControllerRevision", "old"), "old"),)), "ns")

    assert [one["metadata"]["name"] for one in cluster.revisions(MODEL)] == ["new"]
