"""The watch of the Leases by which gateways ask for pods. The API server answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from quire_operator.cluster import Connection, DemandWatch, Key
from quire_operator.cluster import demands as module

NOW = 1_800_000_000.0
M = Key("ns", "m")

Lines = list[bytes]


def lease(name: str = "m", renewed: object = None) -> dict[str, Any]:
    labels = {"serving.quire.dev/namespace": "ns", "serving.quire.dev/name": name}
    return {"metadata": {"name": f"quire-demand-ns.{name}", "labels": labels}, "spec": {"renewTime": renewed}}


def event(kind: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


class Api:
    """`lists` are answered one after the other, an int by this status; so are `watches`. The last of each is
    repeated.
    """

    def __init__(self, lists: list[list[dict[str, Any]] | int], watches: list[Lines | int]) -> None:
        self._lists, self._watches = lists, watches
        self.asked: list[dict[str, str]] = []
        self.open = asyncio.Event()  # a watch has been served in full, and stays open

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        answers: list[Any] = self._watches if "watch" in request.query else self._lists
        is_last = len(answers) == 1
        answer = answers[0] if is_last else answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"message": "no"}, status=answer)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": answer})
        response = web.StreamResponse()
        await response.prepare(request)
        for line in answer:
            await response.write(line)
        if is_last:
            self.open.set()
            await asyncio.sleep(3600)
        return response


@asynccontextmanager
async def watched(api: Api) -> AsyncIterator[tuple[dict[Key, float], list[Key]]]:
    """The demands while they are watched, and the models that were reported."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        connection = Connection(configuration, report=lambda *_: None)
        demands: dict[Key, float] = {Key("ns", "gone"): 1.0}
        changed: list[Key] = []
        watch = DemandWatch(connection, "quire-system", demands, changed.append, lambda: NOW)
        task = asyncio.create_task(watch.run())
        try:
            await asyncio.wait_for(api.open.wait(), 60)
            yield demands, changed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await connection.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_renewal_counts_from_when_it_is_seen_whatever_the_gateways_clock_says() -> None:
    api = Api([[]], [[event("ADDED", lease(renewed="1999-01-01T00:00:00.000000Z"))]])
    async with watched(api) as (demands, changed):
        await until(lambda: M in demands)
        assert demands == {M: NOW}, "and what is gone is forgotten"
        assert changed == [M]
    assert api.asked[1]["resourceVersion"] == "7"
    assert {asked["labelSelector"] for asked in api.asked} == {"serving.quire.dev/role=demand"}


@pytest.mark.parametrize(
    ("renewed", "at"),
    [
        (datetime.fromtimestamp(NOW - 40, UTC).isoformat(), NOW - 40),
        (datetime.fromtimestamp(NOW + 9000, UTC).isoformat(), NOW),
        ("yesterday", 0.0),
        (None, 0.0),
    ],
)
async def test_one_that_was_there_before_counts_from_its_renewal(renewed: object, at: float) -> None:
    async with watched(Api([[lease(renewed=renewed)]], [[]])) as (demands, _):
        assert demands == {M: at}


async def test_a_lease_that_is_deleted_asks_for_nothing() -> None:
    api = Api([[lease(), lease("other")]], [[event("DELETED", lease())]])
    async with watched(api) as (demands, _):
        await until(lambda: M not in demands)
        assert list(demands) == [Key("ns", "other")]


@pytest.mark.parametrize(
    ("lists", "watches"),
    [
        ([500, [lease()]], [[]]),
        ([403, [lease()]], [[]]),
        ([[], [lease()]], [403, []]),
        ([[], [lease()]], [[event("ERROR", {"code": 410, "message": "too old"})], []]),
        ([[], [lease()]], [[b'{"type": "ADDED", "obj\n'], []]),
        ([[], [lease()]], [[b"17\n"], []]),
        ([[], [lease()]], [[event("ADDED", {})], []]),
        ([[], [lease()]], [[], []]),
    ],
    ids=["500", "403", "403 of the watch", "410", "half a line", "no event", "no object", "its end"],
)
async def test_whatever_the_api_server_does_it_is_listed_again(
    lists: list[list[dict[str, Any]] | int], watches: list[Lines | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.01,))
    async with watched(Api(lists, watches)) as (demands, _):
        await until(lambda: M in demands)


def taken(*renewals: float) -> dict[Key, float]:
    """Since when M is waited for, after a Lease was seen at these times."""
    times, waits = iter(renewals), dict[Key, float]()
    clock = [0.0]
    unasked: Any = None
    watch = DemandWatch(unasked, "ns", {}, lambda _: None, lambda: clock[0], waits)
    for clock[0] in times:
        watch._on_event({"type": "MODIFIED", "object": lease()})
        watch._on_event({"type": "DELETED", "object": lease()})
    return waits


def test_the_wait_goes_on_where_one_of_two_gateways_deletes_the_lease() -> None:
    assert taken(NOW, NOW + 10, NOW + 40) == {M: NOW}


def test_after_a_gap_it_is_waited_for_anew() -> None:
    assert taken(NOW, NOW + 10, NOW + 41) == {M: NOW + 41}


async def test_a_list_of_a_gateway_whose_clock_is_behind_forgets_no_renewal_that_was_seen() -> None:
    late = lease(renewed=datetime.fromtimestamp(NOW - 500, UTC).isoformat())
    api = Api([[], [late]], [[event("ADDED", late)], []])
    async with watched(api) as (demands, changed):
        await until(lambda: len(changed) == 2)
        assert demands == {M: NOW}
