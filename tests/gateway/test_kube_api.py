"""Connections to the API server end when they are left."""

import asyncio
import contextlib
import gc
import ssl
import threading
import warnings
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.cluster.pki import Authority, Identity
from e2e.http_server import HttpServer
from e2e.waiting import HANG_SECONDS
from quire_gateway.kube_api import KubeApi


class Watch(BaseHTTPRequestHandler):
    """A watch with one event, from a server that says no farewell when the client leaves."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"type": "ADDED", "object": {}}\n')
        self.server.ended.wait(HANG_SECONDS)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    authority = Authority(tmp_path)
    authority.issue(Identity("server", "server", serves=("127.0.0.1",)))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    with HttpServer(("127.0.0.1", 0), Watch) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        server.ended = threading.Event()
        server.start()
        yield server
        server.ended.set()
        server.stop()


def test_a_watch_that_is_left_leaves_no_connection(server, tmp_path):
    async def leave():
        seen = asyncio.Event()

        async def watch():
            async with KubeApi(server.url.replace("http", "https"), tmp_path).connect() as connection:
                async for _ in connection.watch("/api/v1/pods", "", "1"):
                    seen.set()

        watching = asyncio.ensure_future(watch())
        async with asyncio.timeout(HANG_SECONDS):
            await seen.wait()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    gc.collect()
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        asyncio.run(leave())
        gc.collect()
    assert [str(one.message) for one in left] == []
