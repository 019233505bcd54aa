"""A proxy in front of the API server that injects faults of networks and servers on demand."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from e2e.cluster.apiserver import ApiServer

_OF_THE_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


#: A fault: the request is forwarded, and the client gets no answer.
LOST = 0


class Proxy:
    """`silent`: resources whose watches only deliver bookmarks; `away`: no request is answered; `refusal`:
    the HTTP status of every answer; `latency`: seconds before every answer. `fault`: called for each write of
    an object (not of a Lease), returns the HTTP status to answer instead of forwarding it, LOST, or None;
    `written`: called after each forwarded write, before the client gets the answer.
    """

    def __init__(self, server: ApiServer) -> None:
        self.port = 0
        self.silent: frozenset[str] = frozenset()
        self.away = False
        self.refusal = 0
        self.latency = 0.0
        self.fault: Callable[[], int | None] = lambda: None
        self.written: Callable[[], None] = lambda: None
        self.writes = 0  # requested, whether forwarded or not
        self.faults: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()  # by HTTP status
        self.swallowed = 0
        self.unreached = 0  # requests while the API server was down
        self.expired = 0  # watches that got "410 Gone"
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._watches: dict[asyncio.Task[None], tuple[str, web.StreamResponse]] = {}

    def cut(self) -> None:
        """End all watches."""

        def cancel() -> None:
            for watch in self._watches:
                watch.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def send_line(self, resource: str, line: bytes) -> int:
        """Put a line into the open watches of `resource`; how many these are."""

        async def write() -> int:
            streams = [stream for watched, stream in self._watches.values() if watched == resource]
            for stream in streams:
                await stream.write(line)
            return len(streams)

        return asyncio.run_coroutine_threadsafe(write(), self._loop).result(10)

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
        if self.latency:
            await asyncio.sleep(self.latency)
        is_write = _is_write(request)
        self.writes += is_write
        fault = self.fault() if is_write else None
        if self.away:
            return _hang_up(request)
        if status := fault or self.refusal:
            self.faults[status] += 1
            return web.json_response(_refused(status), status=status)
        try:
            return await self._forward(request, fault)
        except aiohttp.ClientError:
            self.unreached += 1
            return _hang_up(request)

    async def _forward(self, request: web.Request, fault: int | None) -> web.StreamResponse:
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
                body = await answer.read()
                if _is_write(request) and answer.status < 300:
                    self.written()
                if fault == LOST:
                    self.faults[LOST] += 1
                    return _hang_up(request)
                return web.Response(status=answer.status, headers=kept, body=body)
            response = web.StreamResponse(headers=kept)
            await response.prepare(request)
            watch = asyncio.create_task(self._stream(request, answer, response))
            self._watches[watch] = request.path.rpartition("/")[2], response
            await asyncio.wait([watch])
            del self._watches[watch]
            if not watch.cancelled() and watch.exception() is not None:
                return _hang_up(request)
            return response

    async def _stream(
        self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse
    ) -> None:
        resource = request.path.rpartition("/")[2]
        async for line in answer.content:
            self.expired += b'"code":410' in line
            if resource in self.silent and b'"type":"BOOKMARK"' not in line:
                self.swallowed += 1
            else:
                await response.write(line)


def _is_write(request: web.Request) -> bool:
    return request.method not in ("GET", "HEAD") and "/leases" not in request.path


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _refused(status: int) -> dict[str, object]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "message": "a fault"}


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
