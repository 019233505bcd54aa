"""Hostile clients: many silent connections, many that hang up, and invalid data on every socket. Afterwards
the server answers as before.
"""

import asyncio
import contextlib
import os
import pickle
import resource
import socket
from pathlib import Path

import httpx
import pytest

from quire_http.connection_limit import MAX_CONNECTIONS
from quire_server.health.server import MAX_WAITING
from tests.server import listening
from tests.server.conftest import KEY

ASK = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
HEADERS = {"Authorization": f"Bearer {KEY}"}
IDLE = 10_000
STREAMS, MAX_NUM_SEQS = 200, 64  # the latter is the default
MEGABYTE = 1 << 20


def answers(server):
    assert server.post("/v1/completions", ASK, key=KEY).status_code == 200
    assert server.probe("readyz") == 200
    return True


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def open_files(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def many_files():
    """As many open files for us as ten thousand connections take."""
    ours, wanted = resource.getrlimit(resource.RLIMIT_NOFILE), IDLE + 1000
    hard = ours[1] if ours[1] == resource.RLIM_INFINITY else max(ours[1], wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(ours[0], wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (ours[0], hard))


@pytest.mark.deep
def test_ten_thousand_silent_connections_keep_nobody_out_and_close_one_another(server, many_files):
    api = server.children()["api"]
    before_files, before_bytes = open_files(api), resident(api)
    with contextlib.ExitStack() as stack, httpx.Client(base_url=server.url, headers=HEADERS) as client:
        for number in range(IDLE):
            # Addresses of the loopback network: one alone has too few ports where others use them too.
            source = (f"127.0.{1 + number // 5000}.1", 0)
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20, source))
            if number % 1000 == 0:
                assert answers(server)
                assert client.get("/v1/models").status_code == 200, "a connection that is kept and used"
        server.wait("all were taken", lambda: open_files(api) >= MAX_CONNECTIONS)
        assert answers(server)
        assert open_files(api) < MAX_CONNECTIONS + before_files + 50
        assert resident(api) - before_bytes < MAX_CONNECTIONS * 32 * 1024
    server.wait("they are all gone", lambda: open_files(api) < before_files + 50)
    assert answers(server)


def test_silent_connections_to_the_health_server_do_not_keep_probes_out(server):
    health = server.children()["health"]
    with contextlib.ExitStack() as stack:
        for half in (b"", b"GET /readyz HTTP/1.1\r\nHost: x\r\n") * (2 * MAX_WAITING):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", server.health_port), 20))
            silent.sendall(half)
        for probe in ("startupz", "readyz", "livez"):
            assert server.probe(probe) == 200
        threads = len(list(Path(f"/proc/{health}/task").iterdir()))
        assert threads < MAX_WAITING + 10, "each connection has a thread"


def load(server):
    """The numbers of active, running and waiting requests."""
    gauges = ("llm_active_requests", "llm_running_requests", "llm_queue_depth")
    return tuple(server.metric(name) for name in gauges)


async def test_requests_of_two_hundred_disconnecting_clients_are_aborted_at_once(server):
    """Two hundred streams, cut while as many run as may and the others wait: of the tokens that they would
    have had, hardly any is computed.
    """
    ask = ASK | {"max_tokens": 1900, "stream": True, "ignore_eos": True}
    limits = httpx.Limits(max_connections=None)
    full_load = (STREAMS, MAX_NUM_SEQS, STREAMS - MAX_NUM_SEQS)
    server.wait("no earlier request is left", lambda: load(server) == (0, 0, 0))
    pinned = server.metric("llm_kv_cache_utilization")  # by prompts that other tests asked to keep

    async def listen():
        async with client.stream("POST", server.url + "/v1/completions", json=ask) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                pass

    async with httpx.AsyncClient(timeout=60, headers=HEADERS, limits=limits) as client:
        clients = [asyncio.create_task(listen()) for _ in range(STREAMS)]
        await asyncio.to_thread(server.wait, "the server is full", lambda: load(server) == full_load)
        assert not any(one.done() for one in clients), "none was refused, none is served already"
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    computed = server.metric("llm_tokens_generated_total")
    server.wait("nothing runs or waits", lambda: load(server) == (0, 0, 0))
    computed = server.metric("llm_tokens_generated_total") - computed
    assert computed < 0.02 * STREAMS * ask["max_tokens"], "about a second's"
    server.wait("its blocks are free", lambda: server.metric("llm_kv_cache_utilization") <= pinned)
    assert answers(server)


class Bomb:
    """What a careless reader would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_random_bytes_and_pickles_on_every_socket_are_refused(server, tmp_path):
    mark = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    framed = len(bomb).to_bytes(4, "big") + bomb
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(bomb)
    post += b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n" + bomb
    garbage = [
        bomb,
        framed,
        post,
        os.urandom(4096),
        b"\0" * 4096,
        b"\xff" * 4096,
        b"\x16\x03\x01\x02\x00",
        b"\r\n" * 99,
    ]
    found = listening.addresses(server)
    assert found == {
        (socket.AF_INET, ("127.0.0.1", server.port)),
        (socket.AF_INET, ("127.0.0.1", server.health_port)),
        (socket.AF_UNIX, str(server.run_dir() / "engine.sock")),
    }
    pids = server.children()
    for family, address in found:
        for data in garbage:
            with socket.socket(family) as stranger:
                stranger.settimeout(5)
                stranger.connect(address)
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
                    answer = b""
                    while family == socket.AF_INET and (more := stranger.recv(4096)):
                        answer += more
                    assert b" 200 " not in answer[:16], (address, data[:20])
        assert answers(server)
    assert not mark.exists()
    assert server.children() == pids


@pytest.mark.deep
def test_a_slow_request_body_gets_a_408_and_blocks_no_other_client(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    head += b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n"
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 50)) for _ in range(200)
        ]
        for one in slow:
            one.sendall(head + b"{")
        for _ in range(10):
            for one in slow:
                one.sendall(b" ")
            assert answers(server)
        assert server.metric("llm_active_requests") == 0, "who has not asked yet has no place"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not (answer := _peek(slow[0])):
                slow[0].sendall(b" ")
        assert answer.split(b" ")[1] == b"408"
    assert answers(server)


def _peek(connection):
    """What has come within half a second."""
    connection.settimeout(0.5)
    try:
        return connection.recv(64)
    except TimeoutError:
        return b""
