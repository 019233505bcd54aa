"""Clients that keep their connections open: new replicas get their share, and no answer is cut."""

import asyncio
import contextlib
import http.client
import itertools
import threading
import time

import httpx
import pytest

from e2e.ports import free_port
from quire_http.drain import LINGER_SECONDS
from tests.server.launch import NO_TLS, Server
from tests.server.serving.conftest import MAX_AGE

AGE = ("--max-connection-age-seconds", f"{MAX_AGE:g}")
OLD_SECONDS = 1.1 * MAX_AGE + 0.05
ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 2}


def get(connection):
    """The port of the client, the status and the header that closes the connection."""
    connection.request("GET", "/v1/models")
    port = connection.sock.getsockname()[1]
    with connection.getresponse() as response:
        response.read()
        return port, response.status, response.headers["connection"]


def test_an_old_connection_is_closed_by_its_next_answer_and_a_young_one_is_kept(keyless):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", keyless.port, timeout=60)) as client:
        young = [get(client) for _ in range(3)]
        time.sleep(OLD_SECONDS)
        old, after = get(client), get(client)

    port = young[0][0]
    assert young == [(port, 200, None)] * 3
    assert old == (port, 200, "close")
    assert after[0] != port and after[1:] == (200, None)


@pytest.mark.deep
def test_a_stream_that_outlives_its_connections_age_ends_whole(keyless):
    opened = time.monotonic()
    with httpx.Client(base_url=keyless.url, verify=NO_TLS, timeout=60) as client:
        client.get("/v1/models")
        time.sleep(0.8 * MAX_AGE)
        asked = {**ASK, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert time.monotonic() - opened > OLD_SECONDS, "the stream was too short for this test"
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(lines).replace(" ", "")
        assert client.get("/v1/models").headers["connection"] == "close"


@pytest.mark.deep
def test_an_old_connection_that_nobody_uses_is_closed(keyless):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", keyless.port, timeout=60)) as idle:
        get(idle)
        time.sleep(OLD_SECONDS)
        idle.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            idle.sock.recv(1)  # its client may be about to use it again
        idle.sock.settimeout(LINGER_SECONDS + 5)
        assert idle.sock.recv(1) == b""


class Balancer:
    """Spreads connections over `ports`, one after the other, as a Service does."""

    def __init__(self, *ports):
        self.ports = list(ports)
        self.url = ""
        self._numbers = itertools.count()

    async def _relay(self, reader, writer):
        port = self.ports[next(self._numbers) % len(self.ports)]
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    @contextlib.contextmanager
    def running(self):
        loop, port = asyncio.new_event_loop(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        listening = loop.run_until_complete(asyncio.start_server(self._relay, "127.0.0.1", port))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            loop.run_until_complete(_end(listening))
            loop.close()


async def _copy(reader, writer):
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


async def _end(listening):
    listening.close()
    relays = asyncio.all_tasks() - {asyncio.current_task()}
    for relay in relays:
        relay.cancel()
    await asyncio.gather(*relays, return_exceptions=True)
    await asyncio.sleep(0.01)  # transports are closed in one of the next rounds of the loop


@pytest.mark.deep
def test_a_new_replica_gets_requests_of_clients_that_keep_their_connections(keyless, tiny, tmp_path):
    failed, stop = [], threading.Event()

    def ask(url):
        with httpx.Client(base_url=url, verify=NO_TLS, timeout=60) as client:
            while not stop.is_set():
                try:
                    client.post("/v1/completions", json=ASK).raise_for_status()
                except httpx.HTTPError as error:
                    failed.append(error)

    with Server(tiny, tmp_path, *AGE) as new, Balancer(keyless.port).running() as balancer:
        new.wait_ready()
        clients = [threading.Thread(target=ask, args=(balancer.url,)) for _ in range(4)]
        for client in clients:
            client.start()
        time.sleep(0.5)
        balancer.ports.append(new.port)
        try:
            new.wait("requests", lambda: new.metric("llm_requests_total", status="success") >= 10)
        finally:
            stop.set()
            for client in clients:
                client.join(30)
    assert failed == []
