"""The table of ready pods, through all that may happen to a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire_metrics_adapter import pods
from quire_metrics_adapter.errors import AdapterError, GoneError, UnreachableError
from quire_metrics_adapter.owners import Owners
from quire_metrics_adapter.pods import LOST_SECONDS, PodTable
from tests.metrics_adapter.fake_api import FakeApi

Body = dict[str, Any]


def pod(uid: str, *, ready: bool = True, deployment: str = "chat", ip: str = "10.0.0.1", **more: Any) -> Body:
    return {
        "metadata": {
            "uid": uid,
            "namespace": "team-a",
            "labels": {"serving.quire.dev/name": deployment},
            "resourceVersion": "11",
            "ownerReferences": [{"controller": True, "kind": "ReplicaSet", "uid": f"of-{deployment}"}],
            **more,
        },
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def event(kind: str, body: Body) -> Body:
    return {"type": kind, "object": body}


def bookmark(version: str) -> Body:
    return event("BOOKMARK", {"metadata": {"resourceVersion": version}})


@pytest.mark.parametrize(
    "body",
    [
        pod("a", ready=False),
        pod("a", ip=""),
        pod("a", deployment=""),
        pod("a", deletionTimestamp="2026-01-01T00:00:00Z"),
        {"metadata": {"uid": "a", "namespace": "team-a"}},
    ],
)
def test_only_ready_pods_of_an_llmdeployment_are_scraped(body: Body) -> None:
    assert pods.read(body) is None


def test_the_table_follows_added_changed_and_removed_pods() -> None:
    table = PodTable()
    table.put(pod("a"))
    table.put(pod("b"))
    table.put(pod("other", deployment="code"))
    assert table.of("team-a", "chat") == {"a", "b"}
    assert table.of("team-b", "chat") == frozenset()

    table.put(pod("a", ready=False))
    table.remove(pod("b"))
    assert table.of("team-a", "chat") == frozenset()
    assert [p.deployment for p in table.all()] == ["code"]


def test_new_and_changed_pods_set_the_changed_event_and_unchanged_ones_do_not() -> None:
    table = PodTable()
    table.put(pod("a"))
    assert table.changed.is_set()
    table.changed.clear()
    table.put(pod("a"))
    assert not table.changed.is_set()
    table.put(pod("a", ip="10.0.0.2"))
    assert table.changed.is_set()


async def watching(api: FakeApi, table: PodTable, until: Callable[[], bool]) -> None:
    task = asyncio.create_task(pods.watch(api, Owners(api), table))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            while not until():
                await asyncio.sleep(0.01)
    finally:
        task.cancel()


async def test_an_ended_watch_resumes_at_the_last_resource_version_without_a_relist() -> None:
    api, table = FakeApi(), PodTable()
    api.pods = [pod("a")]
    api.watches = [[bookmark("20")], [event("ADDED", pod("b"))]]

    await watching(api, table, lambda: table.of("team-a", "chat") == {"a", "b"})

    assert [path for path, _ in api.asked].count("/api/v1/pods") == 1
    versions = [query["resourceVersion"] for path, query in api.asked if path.startswith("watch")]
    assert versions == ["10", "20"]


@pytest.mark.parametrize("error", [GoneError("410"), UnreachableError("reset")])
async def test_a_watch_error_causes_a_relist(error: AdapterError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "_RETRY_SECONDS", 0)
    api, table = FakeApi(), PodTable()
    api.pods = [pod("a")]

    def lists() -> int:
        return [path for path, _ in api.asked].count("/api/v1/pods")

    api.watches = [[event("DELETED", pod("a")), error], []]
    await watching(api, table, lambda: lists() == 2)

    assert table.of("team-a", "chat") == {"a"}


async def test_a_pod_counts_by_its_owners_whatever_its_labels_say() -> None:
    api, table = FakeApi(), PodTable()
    bare = pod("bare", ownerReferences=[])
    of_another = pod("of-another")
    of_another["metadata"]["ownerReferences"][0]["uid"] = "of-code"
    invented = pod("invented")
    invented["metadata"]["ownerReferences"][0]["uid"] = "of-nobody"
    api.pods = [pod("a"), bare, of_another, invented]
    api.watches = [
        [event("ADDED", {**bare, "metadata": {**bare["metadata"], "uid": "late"}}), event("ADDED", pod("b"))]
    ]

    await watching(api, table, lambda: "b" in table.of("team-a", "chat"))

    assert table.of("team-a", "chat") == {"a", "b"}
    assert not table.has_any("team-a", "") and len(table.all()) == 2
    assert len([path for path, _ in api.asked if path.endswith("/replicasets")]) == 2, (
        "asked once for a stranger's"
    )


@pytest.mark.parametrize(("groups", "counted"), [(("wide",), {"leader"}), ((), set())])
async def test_the_leader_of_a_group_counts_by_its_owners(groups: tuple[str, ...], counted: set[str]) -> None:
    api, table = FakeApi(), PodTable()
    api.groups = groups
    by_set: Body = {"ownerReferences": [{"controller": True, "kind": "StatefulSet", "uid": "of-wide"}]}
    api.pods = [pod("a"), pod("leader", deployment="wide", **by_set)]

    await watching(api, table, lambda: table.of("team-a", "chat") == {"a"})

    assert table.of("team-a", "wide") == counted


async def test_pods_of_a_role_count_for_that_role_and_by_its_deployment() -> None:
    """`chat-prefill` is the Deployment of the prefill pods, `chat-other` one that nothing of ours made."""
    api, table = FakeApi(), PodTable()
    api.pods = [pod("decode"), of_deployment("chat-prefill"), of_deployment("chat-other")]

    await watching(api, table, lambda: bool(table.of("team-a", "chat", "prefill")))

    assert table.of("team-a", "chat", "prefill") == {"chat-prefill"}
    assert table.of("team-a", "chat") == {"decode"}
    assert len(table.all()) == 2

    table.remove(of_deployment("chat-prefill"))
    assert table.of("team-a", "chat", "prefill") == frozenset()
    assert table.of("team-a", "chat") == {"decode"}


def of_deployment(name: str) -> Body:
    """A prefill pod, by its labels, of this Deployment."""
    made = pod(name)
    made["metadata"]["labels"]["serving.quire.dev/role"] = "prefill"
    made["metadata"]["ownerReferences"][0]["uid"] = f"of-{name}"
    return made


def test_the_table_stays_valid_for_a_limited_time_after_the_watch_was_lost() -> None:
    now = [0.0]
    table = PodTable(lambda: now[0])
    assert not table.known, "nothing was ever listed"
    table.connected(True)
    now[0] = 1000
    assert table.known
    table.connected(False)
    table.connected(False)
    now[0] += LOST_SECONDS
    assert table.known
    now[0] += 0.1
    assert not table.known
    table.connected(True)
    assert table.known
