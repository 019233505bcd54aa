"""A proxy in front of the API server that loses, on demand, what a real network or a real server loses.

It speaks TLS with the API server's own certificate and passes everything on as it is, the credentials too.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from e2e.cluster.apiserver import ApiServer

_OF_THE_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Proxy:
    """`silent`: resources whose watches tell nothing any more but bookmarks; `away`: nobody is served."""

    def __init__(self, server: ApiServer) -> None:
        self.port = 0
        self.silent: frozenset[str] = frozenset()
        self.away = False
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.swallowed = 0
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._watches: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """End all watches."""

        def cancel() -> None:
            for watch in self._watches:
                watch.cancel()

        self._loop.call_soon_threadsafe(cancel)

    async def run(self, started: threading.Event, stop: asyncio.Event) -> None:
        pki = self._server.directory / "pki"
        inside = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        inside.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
        outside = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        app = web.Application(client_max_size=1 << 24)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=outside, limit=0), auto_decompress=False, read_bufsize=1 << 24
        ) as self._session:
            app.router.add_route("*", "/{path:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=inside)
            await site.start()
            self.port = runner.addresses[0][1]
            started.set()
            await stop.wait()
            self.cut()
            await runner.cleanup()
        await asyncio.sleep(0.1)  # a closed TLS connection is closed some turns of the loop later

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_THE_CONNECTION}
        async with self._session.request(
            request.method,
            f"{self._server.url}{request.raw_path}",
            headers=headers | {"Accept-Encoding": "identity"},
            data=await request.read() or None,  # an empty body would get a content type
        ) as answer:
            self.answers[answer.status] += 1
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_THE_CONNECTION}
            if request.query.get("watch") != "true" or answer.status != 200:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(headers=kept)
            await response.prepare(request)
            watch = asyncio.create_task(self._stream(request, answer, response))
            self._watches.add(watch)
            await asyncio.wait([watch])
            self._watches.discard(watch)
            return response

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        resource = request.path.rpartition("/")[2]
        async for line in answer.content:
            if resource in self.silent and b'"type":"BOOKMARK"' not in line:
                self.swallowed += 1
            else:
                await response.write(line)


@contextmanager
def proxied(server: ApiServer) -> Iterator[Proxy]:
    """A proxy that runs while the block does."""
    proxy, started, stop = Proxy(server), threading.Event(), asyncio.Event()
    loop = proxy._loop
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.run(started, stop),), daemon=True)
    thread.start()
    try:
        assert started.wait(10), "the proxy does not start"
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
