"""Timeouts of connections with incomplete requests or slow readers; the tests fire the timers themselves."""

import asyncio

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire_server.api.drain import LINGER_SECONDS
from quire_server.api.http_protocol import Connection

MAX_AGE = 12.0  # less than the other timeouts
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written = b""
        self.closed = self.ended = False

    def write(self, data):
        self.written += data

    def write_eof(self):
        self.ended = True

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class ManualLoop:
    """An event loop whose timers fire when the test calls `advance`."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, callback):
        self.timers.append((delay, asyncio.TimerHandle(0, callback, (), asyncio.get_running_loop())))
        return self.timers[-1][1]

    def create_task(self, work):
        return asyncio.get_running_loop().create_task(work)

    def advance(self, seconds):
        """Fire all timers that are due within `seconds`."""
        due = [timer for delay, timer in self.timers if delay <= seconds]
        self.timers = [(delay - seconds, timer) for delay, timer in self.timers if delay > seconds]
        for timer in due:
            if not timer.cancelled():
                timer._run()


class Client:
    """One connection to an application that responds, without reading the body, once `answer` is set."""

    def __init__(self):
        self.answer = asyncio.Event()
        self.loop, self.transport = ManualLoop(), Transport()
        config = Config(
            self.application, interface="asgi3", log_config=None, ws="none", timeout_keep_alive=75
        )
        self.connection = Connection(config, ServerState(), {}, self.loop, max_age=MAX_AGE)
        self.connection.connection_made(self.transport)

    async def application(self, scope, receive, send):
        await self.answer.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def answered(self):
        self.answer.set()
        while not self.transport.written:
            await asyncio.sleep(0)


@pytest.fixture
async def client():
    return Client()


async def test_a_connection_with_incomplete_headers_is_closed(client):
    client.connection.data_received(POST[:20])
    client.loop.advance(40)
    assert client.transport.closed


@pytest.mark.parametrize("more", [b"\r\n", b"GET / HT"], ids=["an empty line", "half of a next request"])
async def test_extra_bytes_after_a_request_do_not_cut_its_response(client, more):
    client.connection.data_received(POST + b"0123456789")
    client.connection.data_received(more)
    client.loop.advance(40)
    assert not client.transport.closed
    await client.answered()
    client.connection.data_received(b"X")
    client.loop.advance(40)
    assert client.transport.closed, "after the response the timeout applies again"


async def test_a_body_that_is_still_incomplete_after_its_response_closes_the_connection(client):
    client.connection.data_received(POST)
    await client.answered()
    client.connection.data_received(b"0")
    client.loop.advance(40)
    assert client.transport.closed


async def test_a_body_that_completes_after_its_response_leaves_an_idle_connection(client):
    client.connection.data_received(POST)
    await client.answered()
    client.connection.data_received(b"0123456789")
    client.loop.advance(40)
    assert not client.transport.closed
    client.loop.advance(100)
    assert client.transport.closed


async def test_a_client_that_reads_nothing_is_disconnected_and_a_slow_one_is_not(client):
    client.connection.data_received(POST + b"0123456789")
    for _ in range(3):
        client.connection.pause_writing()
        client.loop.advance(50)
        client.connection.resume_writing()
    client.loop.advance(100)
    assert not client.transport.closed
    client.connection.pause_writing()
    client.loop.advance(100)
    assert client.transport.closed
    client.connection.resume_writing()
    await client.answered()


async def test_an_old_connection_is_closed_when_its_client_no_longer_uses_it(client):
    client.connection.data_received(POST + b"0123456789")
    await client.answered()
    client.loop.advance(MAX_AGE * 1.1)
    assert not client.transport.closed, "its client may be about to use it again"
    client.connection.idle_since -= LINGER_SECONDS
    client.loop.advance(LINGER_SECONDS)
    assert client.transport.closed


async def test_an_old_connection_is_not_closed_while_it_answers(client):
    client.connection.data_received(POST + b"0123456789")
    for _ in range(10):
        client.loop.advance(MAX_AGE * 1.1)
    assert not client.transport.closed
    await client.answered()
    client.connection.idle_since -= LINGER_SECONDS
    client.loop.advance(LINGER_SECONDS)
    assert client.transport.closed


async def test_connections_that_were_opened_together_do_not_end_together():
    ages = {client.connection.expires_at - client.connection.opened_at for client in (Client(), Client())}
    assert len(ages) == 2 and all(0.9 * MAX_AGE <= age <= 1.1 * MAX_AGE for age in ages)


async def test_what_a_refused_client_still_sends_is_dropped_and_a_silent_one_is_disconnected(client):
    client.connection.data_received(b"GET / HTTP/1.1\r\nBig: " + b"x" * (1 << 20))
    assert client.transport.written.startswith(b"HTTP/1.1 431 ")
    assert client.transport.ended
    assert not client.transport.closed, "bytes unread would reset the connection, and the answer with it"
    written = len(client.transport.written)
    client.connection.data_received(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    assert len(client.transport.written) == written
    client.loop.advance(10)
    assert client.transport.closed
