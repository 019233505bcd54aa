"""What a ControllerRevision keeps is asked for once while it is there, and forgotten with it."""

from __future__ import annotations

from quire_operator.cluster import Cluster, kinds
from quire_operator.cluster.renders import Renders
from tests.operator.fake_api import FakeApi, connected
from tests.operator.test_cluster import allowed, thing

REVISIONS = "/apis/apps/v1/namespaces/ns/controllerrevisions"


def test_what_a_revision_kept_is_forgotten_with_it_and_all_else_stays() -> None:
    renders = Renders()
    renders.put("old", {"image": "a"})
    renders.put("new", {"image": "b"})
    renders.keep({"new": 7})

    assert renders.get("old") is None
    assert renders.get("new") == {"image": "b"}


async def test_a_list_of_revisions_costs_no_second_look_at_those_that_are_left() -> None:
    api = FakeApi()
    for name in ("old", "new"):
        api.put(f"{REVISIONS}/{name}", {**thing("ControllerRevision", name), "data": {"of": name}})
    async with connected(api) as connection:
        cluster = Cluster(connection, fence=allowed, instance="op-1")
        await cluster.relist(kinds.REVISION, ["ns"])
        assert [await cluster.kept("ns", name) for name in ("old", "new")] == [{"of": "old"}, {"of": "new"}]
        del api.objects[f"{REVISIONS}/old"]
        await cluster.relist(kinds.REVISION, ["ns"])
        asked = len(api.requests)

        assert await cluster.kept("ns", "new") == {"of": "new"}
        assert len(api.requests) == asked
        assert await cluster.kept("ns", "old") is None
