"""Events of a limit store: one for each change, which outlive an API server that is away."""

import asyncio
import contextlib

import pytest

from quire_gateway import store_events
from quire_gateway.kube_api import ConflictError, KubeError
from quire_gateway.store_events import StoreEvents


class Api:
    """Keeps what is created. ``errors``: of the next requests that create."""

    def __init__(self):
        self.created, self.errors = [], []
        self.leases = [{"metadata": {"name": "g", "namespace": "quire", "uid": "u"}}]

    @contextlib.asynccontextmanager
    async def connect(self):
        yield self

    async def list(self, path, selector):
        return self.leases, "1"

    async def send(self, method, path, body, content_type):
        if self.errors:
            raise self.errors.pop(0)
        self.created.append(body)

    def reasons(self):
        return [one["reason"] for one in self.created]


@pytest.fixture
async def api(monkeypatch):
    monkeypatch.setattr(store_events, "_PAUSE_SECONDS", 0)
    return Api()


@contextlib.asynccontextmanager
async def events_of(api, **options):
    events = StoreEvents(api, ("quire", "g"), **{"denies": False, **options})
    task = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_each_change_is_said_once_and_an_answer_at_the_start_is_none(api):
    async with events_of(api) as events:
        for is_up in (True, False, False, True, True, False):
            events.changed(is_up=is_up)
        await until(lambda: len(api.created) == 3)
    assert api.reasons() == ["LimitStoreLost", "LimitStoreBack", "LimitStoreLost"]
    assert api.created[0]["regarding"]["uid"] == "u" and "shares" in api.created[0]["note"]


async def test_where_clients_are_refused_the_event_says_so(api):
    async with events_of(api, denies=True) as events:
        events.changed(is_up=False)
        await until(lambda: api.created)
    assert "refused" in api.created[0]["note"] and "shares" not in api.created[0]["note"]


async def test_one_that_cannot_be_created_is_tried_again_and_one_that_is_there_is_not(api, caplog):
    api.errors = [KubeError("HTTP 500"), ConflictError("there")]
    async with events_of(api) as events:
        events.changed(is_up=False)
        await until(lambda: not api.errors)
        events.changed(is_up=True)
        await until(lambda: api.created)
    assert api.reasons() == ["LimitStoreBack"]
    assert len([one for one in caplog.records if "limit store" in one.message]) == 1


async def test_a_gateway_without_a_lease_says_it_as_well(api):
    api.leases = []
    async with events_of(api) as events:
        events.changed(is_up=False)
        await until(lambda: api.created)
    assert api.created[0]["regarding"]["name"] == "g"
