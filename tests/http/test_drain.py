"""Graceful shutdown: which connections are still served, and when the process may exit."""

import asyncio
from dataclasses import dataclass

from quire_http.drain import ENDPOINT_REMOVAL_SECONDS, LINGER_SECONDS, Drain, DrainLimits


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@dataclass
class OpenConnection:
    opened_at: float = 0.0
    idle_since: float | None = None


def make_drain(timeout=10.0, pre_stop=10.0):
    clock = Clock()
    return Drain(DrainLimits(timeout, pre_stop), clock), clock


async def is_done_soon(task):
    await asyncio.sleep(0.12)
    return task.done()


def test_during_a_drain_old_connections_are_served_and_new_ones_refused():
    drain, clock = make_drain()
    assert not drain.refuses(opened_at=99.0)
    drain.begin()
    clock.now += 1
    assert not drain.refuses(opened_at=99.0)
    assert drain.refuses(opened_at=100.5)


def test_without_pre_stop_new_connections_are_served_until_endpoints_are_updated():
    drain, clock = make_drain(pre_stop=0.0)
    drain.begin()
    clock.now += ENDPOINT_REMOVAL_SECONDS - 0.1
    assert not drain.refuses(opened_at=101.0)
    clock.now += 0.2
    assert drain.refuses(opened_at=101.0)


async def test_without_connections_it_ends_at_once():
    drain, _ = make_drain()
    drain.begin()
    await asyncio.wait_for(drain.wait_for_end(list), 30)
    assert not drain.cut.is_set()


async def test_it_waits_for_requests_and_cuts_them_after_the_timeout():
    drain, clock = make_drain(timeout=10.0)
    drain.num_requests = 1
    drain.begin()
    task = asyncio.create_task(drain.wait_for_end(list))
    clock.now += 9.9
    assert not await is_done_soon(task)
    assert not drain.cut.is_set()
    clock.now += 0.2
    await asyncio.wait_for(drain.cut.wait(), 30)
    drain.num_requests = 0
    await asyncio.wait_for(task, 30)


async def test_it_waits_for_what_other_servers_have_asked_for_but_not_beyond_its_time():
    drain, clock = make_drain(timeout=10.0)
    asked = [True]
    drain.begin()
    task = asyncio.create_task(drain.wait_for_end(list, lambda: asked[0]))
    assert not await is_done_soon(task)
    asked[0] = False
    await asyncio.wait_for(task, 30)
    asked[0] = True
    clock.now += 10.0
    await asyncio.wait_for(drain.wait_for_end(list, lambda: asked[0]), 30)


async def test_an_idle_connection_is_kept_for_the_linger_time():
    drain, clock = make_drain()
    connection = OpenConnection(idle_since=clock.now)
    drain.begin()
    task = asyncio.create_task(drain.wait_for_end(lambda: [connection]))
    clock.now += LINGER_SECONDS - 0.1
    assert not await is_done_soon(task)
    clock.now += 0.2
    await asyncio.wait_for(task, 30)


async def test_a_second_begin_cuts_requests_at_once():
    drain, _ = make_drain()
    drain.num_requests = 1
    drain.begin()
    drain.begin()
    task = asyncio.create_task(drain.wait_for_end(list))
    await asyncio.wait_for(drain.cut.wait(), 30)
    drain.num_requests = 0
    await asyncio.wait_for(task, 30)
