"""Timeouts of connections with incomplete requests or slow readers, which the tests fire themselves; bounds
of what one connection may send, and of how many there are.
"""

import asyncio
import json

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire_http.connection_limit import ConnectionLimit
from quire_http.drain import LINGER_SECONDS
from quire_http.parser_turns import ParserTurns
from quire_http.protocol import MAX_HEADERS, MAX_PIPELINED, Connection

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

    def get_write_buffer_size(self):
        return 0

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

    def call_soon(self, callback, *args):
        return asyncio.get_running_loop().call_soon(callback, *args)

    def create_task(self, work):
        return asyncio.get_running_loop().create_task(work)

    def advance(self, seconds):
        """Fire all timers that are due within `seconds`."""
        due = [timer for delay, timer in self.timers if delay <= seconds]
        self.timers = [(delay - seconds, timer) for delay, timer in self.timers if delay > seconds]
        for timer in due:
            if not timer.cancelled():
                timer._run()


def settings(limit=None, max_age=300):
    return {"max_age": max_age, "limit": limit or ConnectionLimit(), "turns": ParserTurns()}


class Client:
    """One connection to an application that responds, without reading the body, once `answer` is set."""

    def __init__(self, limit=None):
        self.answer = asyncio.Event()
        self.loop, self.transport = ManualLoop(), Transport()
        config = Config(
            self.application, interface="asgi3", log_config=None, ws="none", timeout_keep_alive=75
        )
        self.connection = Connection(config, ServerState(), {}, self.loop, **settings(limit, MAX_AGE))
        self.connection.connection_made(self.transport)

    async def application(self, scope, receive, send):
        await self.answer.wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def receives(self, data):
        """Data comes, and is parsed in turns."""
        self.connection.data_received(data)
        while self.connection._unparsed:
            await asyncio.sleep(0)

    async def answered(self):
        self.answer.set()
        async with asyncio.timeout(60):
            while not self.transport.written:
                await asyncio.sleep(0)


@pytest.fixture
async def client():
    return Client()


async def test_a_response_without_a_body_is_sent_before_its_connection_is_closed_or_refuses(client):
    request = b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"

    async def answers_and_closes(scope, receive, send):
        await Client.application(client, scope, receive, send)
        client.connection.shutdown()

    client.connection.app = answers_and_closes
    client.connection.data_received(request)
    await client.answered()
    assert client.transport.closed and client.transport.written.startswith(b"HTTP/1.1 401")

    other = Client()
    other.connection.data_received(request + b"nonsense\r\n\r\n")
    await other.answered()
    assert other.transport.written.index(b"HTTP/1.1 401") < other.transport.written.index(b"HTTP/1.1 400")


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
    await client.receives(b"0123456789")
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
    await client.receives(b"GET / HTTP/1.1\r\nBig: " + b"x" * (1 << 20))
    assert client.transport.written.startswith(b"HTTP/1.1 431 ")
    assert client.transport.ended
    assert not client.transport.closed, "bytes unread would reset the connection, and the answer with it"
    written = len(client.transport.written)
    client.connection.data_received(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    assert len(client.transport.written) == written
    client.loop.advance(10)
    assert client.transport.closed


def refusal(client):
    head, _, body = client.transport.written.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, json.loads(body)["error"]


async def test_at_the_limit_the_connection_that_has_waited_longest_makes_room_for_a_new_one():
    limit = ConnectionLimit(3)
    silent, busy, slow = (Client(limit) for _ in range(3))
    await busy.receives(POST + b"0123456789")  # it is being answered
    await slow.receives(POST)  # a body of which nothing comes
    new = Client(limit)
    assert [one.transport.closed for one in (silent, busy, slow, new)] == [True, False, False, False]
    await new.receives(POST + b"0123456789")
    await new.answered()  # and is idle
    newer = Client(limit)
    assert [one.transport.closed for one in (busy, slow, new, newer)] == [False, True, False, False]
    await newer.receives(POST + b"0123456789")
    Client(limit)
    assert [one.transport.closed for one in (busy, new, newer)] == [False, True, False]


async def test_where_every_connection_is_being_answered_a_new_one_gets_a_503_with_a_reason():
    limit = ConnectionLimit(2)
    busy = [Client(limit) for _ in range(2)]
    for one in busy:
        await one.receives(POST + b"0123456789")
    refused = Client(limit)
    status, head, error = refusal(refused)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert b"retry-after: 1" in head.lower() and refused.transport.closed
    busy[0].connection.connection_lost(None)
    assert not Client(limit).transport.written


async def test_a_head_with_too_many_headers_is_refused(client):
    await client.receives(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
    assert not client.transport.written
    other = Client()
    await other.receives(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 2))
    assert refusal(other)[0] == 431


async def test_requests_beyond_those_that_may_wait_are_refused_after_the_others_are_answered(client):
    client.answer.set()
    await client.receives(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    while not client.transport.ended:
        await asyncio.sleep(0)
    statuses = [line.split()[1] for line in client.transport.written.split(b"\r\n") if line[:5] == b"HTTP/"]
    assert statuses[-1] == b"400" and set(statuses[:-1]) == {b"401"}
    assert MAX_PIPELINED <= len(statuses) - 1 <= 2 * MAX_PIPELINED


async def test_of_requests_that_wait_before_a_refusal_each_has_its_answer(client):
    await client.receives(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (MAX_PIPELINED + 1) + b"GET nonsense\r\n")
    await client.answered()
    async with asyncio.timeout(60):
        while not client.transport.ended:
            await asyncio.sleep(0)
    statuses = [line.split()[1] for line in client.transport.written.split(b"\r\n") if line[:5] == b"HTTP/"]
    assert statuses == [b"401"] * (MAX_PIPELINED + 1) + [b"400"]


async def test_a_packet_of_tiny_chunks_is_parsed_in_turn_with_everything_else(client):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.connection.data_received(head + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n")
    rounds = 0
    while client.connection._unparsed:
        rounds += 1
        await asyncio.sleep(0)
    assert rounds > 10, "the loop had its turn only once all was parsed"
    await client.answered()
    assert client.transport.written.startswith(b"HTTP/1.1 401 ")
