"""A request that has been read ends with its work, with its client, or with the drain."""

import asyncio
import gc
import weakref

import pytest

from quire_http.drain import Cut
from quire_http.exchange import ClientGoneError, CutError, HttpExchange


class Client:
    """What the server says of a client: nothing, until it hangs up."""

    def __init__(self):
        self.is_gone = Cut()


def exchange(client):
    scope = {"type": "http", "path": "/", "headers": [], "state": {"lost": client.is_gone}}
    return HttpExchange(scope, None, None)


class Work:
    """Work that waits, and remembers whether it was cleaned up."""

    def __init__(self, on_begin=lambda: None):
        self.on_begin = on_begin
        self.is_closed = False
        self.go_on = asyncio.Event()

    async def run(self):
        try:
            self.on_begin()
            await self.go_on.wait()
        finally:
            self.is_closed = True


async def test_work_that_ends_ends_the_wait_and_leaves_no_task():
    client, cut = Client(), Cut()
    work = Work()
    work.go_on.set()

    await exchange(client).run(work.run(), cut)

    assert work.is_closed and not cut.callbacks and not client.is_gone.callbacks
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_work_is_raised_as_it_is():
    async def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await exchange(Client()).run(fails(), Cut())


@pytest.mark.parametrize("reason", [ClientGoneError, CutError])
async def test_work_is_cleaned_up_before_the_reason_of_its_end_is_raised(reason):
    client, cut = Client(), Cut()
    end = client.is_gone.set if reason is ClientGoneError else cut.set
    work = Work(on_begin=end)

    with pytest.raises(reason):
        await exchange(client).run(work.run(), cut)

    assert work.is_closed
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # a cancellation that was left over would be raised here


async def test_a_drain_that_is_over_lets_no_work_wait():
    cut = Cut()
    cut.set()

    with pytest.raises(CutError):
        await exchange(Client()).run(Work().run(), cut)


async def test_a_client_that_goes_while_the_drain_ends_is_one_reason_alone():
    client, cut = Client(), Cut()

    def both():
        client.is_gone.set()
        asyncio.get_running_loop().call_soon(cut.set)

    with pytest.raises((ClientGoneError, CutError)):
        await exchange(client).run(Work(on_begin=both).run(), cut)

    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_elsewhere_stays_one_even_where_the_client_is_gone_too():
    client = Client()
    work = Work()
    task = asyncio.ensure_future(exchange(client).run(work.run(), Cut()))
    await asyncio.sleep(0)  # it begins

    client.is_gone.set()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.is_closed


async def test_a_timeout_within_the_work_is_its_own():
    async def times_out():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await exchange(Client()).run(times_out(), Cut())


async def test_nothing_of_a_request_that_was_cut_stays_in_memory_until_a_collection():
    class Body:
        pass

    async def holds(body, begun):
        begun()
        await asyncio.Event().wait()
        del body

    cut = Cut()
    body = Body()
    left = weakref.ref(body)
    work = holds(body, cut.set)
    del body
    gc.disable()
    try:
        with pytest.raises(CutError):
            await exchange(Client()).run(work, cut)
        del work
        await asyncio.sleep(0)  # until then the event loop has the cancellation in its hands
        assert left() is None
    finally:
        gc.enable()
