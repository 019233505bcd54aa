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


def test_the_data_of_a_deleted_revision_is_dropped_and_other_data_stays() -> None:
    renders = RevisionCache()
    renders.put(ONE, "old", {"image": "a"})
    renders.put(ONE, "new", {"image": "b"})
    renders.keep({"new": 7})

    assert renders.get(ONE, "old") is None
    assert renders.get(ONE, "new") == {"image": "b"}


def test_only_the_two_most_recently_used_revisions_per_llmdeployment_are_kept() -> None:
    renders = RevisionCache()
    renders.put(OTHER, "only", {"image": "o"})
    renders.put(ONE, "back", {"image": "1"})
    for number in range(2, 9):
        assert renders.get(ONE, "back"), "where a failed rollout went back to is asked for at every look"
        renders.put(ONE, f"r{number}", {"image": str(number)})

    left = [uid for uid in ("back", *(f"r{number}" for number in range(2, 9))) if renders.get(ONE, uid)]
    assert left == ["back", "r8"]
    assert renders.get(OTHER, "only"), "each has its own"


async def test_a_relist_keeps_the_data_of_remaining_revisions_without_another_read() -> None:
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


async def test_deleting_a_revision_removes_it_from_the_history_without_a_watch_event() -> None:
    api = FakeApi()
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        for name in ("old", "new"):
            revision = thing("ControllerRevision", name, uid=name, ownerReferences=owner())
            cluster.cache.put(api.put(f"{REVISIONS}/{name}", revision))
        assert len(cluster.revisions(MODEL)) == 2
        await cluster.execute(Plan(delete=((Ref("ControllerRevision", "old"), "old"),)), "ns")

    assert [one["metadata"]["name"] for one in cluster.revisions(MODEL)] == ["new"]
