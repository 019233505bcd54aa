"""The port accepts a limited number of connections, and other clients do not lock out the API server."""

from __future__ import annotations

import asyncio
import datetime
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.cluster.pki import Authority, Identity
from quire_metrics_adapter import listener
from quire_metrics_adapter.certificates import Credentials, issue
from quire_metrics_adapter.listener import Listener

HOST = "adapter.quire-system.svc"
MOST = 3

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def listening(callers: str = "") -> AsyncIterator[tuple[int, Credentials]]:
    """A port for MOST connections, and what it serves with."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    port = Listener(runner, 0, MOST)
    now = datetime.datetime.now(datetime.UTC)
    credentials = issue("pod-a", [HOST], now, datetime.timedelta(hours=1))
    port.serve(credentials, callers)
    task = asyncio.create_task(port.run())
    try:
        yield port.port, credentials
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        port.close()
        await runner.cleanup()


async def connect(port: int, trusted: Credentials, certificate: tuple[Path, Path] | None = None) -> Streams:
    tls = ssl.create_default_context(cadata=trusted.authority.decode())
    if certificate:
        tls.load_cert_chain(*certificate)
    return await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=HOST)


async def ask(streams: Streams) -> bytes:
    """The first line of an answer, nothing when the connection is closed."""
    reader, writer = streams
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    return head.split(b"\r\n")[0]


OK = b"HTTP/1.1 200 OK"


async def test_beyond_the_limit_the_oldest_unauthenticated_connection_is_closed() -> None:
    async with listening() as (port, credentials):
        strangers = [await connect(port, credentials) for _ in range(MOST)]
        assert [await ask(one) for one in strangers] == [OK] * MOST
        newest = await connect(port, credentials)

        assert await ask(newest) == OK
        assert [await ask(one) for one in strangers] == [b"", OK, OK]
        for _, writer in (*strangers, newest):
            writer.close()


async def test_the_api_servers_connections_are_kept_and_others_refused_at_the_limit(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue(Identity("proxy", "front-proxy-client"))
    pair = (tmp_path / "proxy.crt", tmp_path / "proxy.key")
    async with listening((tmp_path / "ca.crt").read_text()) as (port, credentials):
        stranger = await connect(port, credentials)
        proxies = [await connect(port, credentials, pair) for _ in range(MOST)]
        assert [await ask(one) for one in proxies] == [OK] * MOST
        assert await ask(stranger) == b""
        try:
            refused = await ask(await connect(port, credentials))
        except (ConnectionError, ssl.SSLError):
            refused = b""

        assert refused == b""
        assert [await ask(one) for one in proxies] == [OK] * MOST
        for _, writer in (stranger, *proxies):
            writer.close()


async def test_unfinished_tls_handshakes_do_not_lock_out_other_clients() -> None:
    async with listening() as (port, credentials):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MOST)]
        streams = await connect(port, credentials)

        assert await ask(streams) == OK, "handshakes that never end held every place"
        assert await silent[0][0].read() == b"", "the oldest of them has gone"
        for _, writer in (*silent, streams):
            writer.close()


async def test_plain_http_connections_do_not_use_up_the_limit() -> None:
    async with listening() as (port, credentials):
        for _ in range(2 * MOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()

        streams = await connect(port, credentials)
        assert await ask(streams) == OK
        streams[1].close()


async def test_a_process_without_a_free_file_descriptor_accepts_again_once_it_has_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_SECONDS", 0.0)
    loop = asyncio.get_running_loop()
    accept, refusals = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

    async def refusing(taken: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return await accept(taken)

    monkeypatch.setattr(loop, "sock_accept", refusing)
    async with listening() as (port, credentials):
        streams = await connect(port, credentials)
        assert await ask(streams) == OK
        streams[1].close()
    assert "cannot take a connection" in caplog.text and not refusals
