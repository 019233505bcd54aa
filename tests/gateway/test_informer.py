"""The table of replicas follows the API server: every change, versions that are too old, lost events."""

import asyncio
import contextlib
import time
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.http_server import HttpServer
from quire_gateway.informer import ENDPOINT_SLICES, Informer
from quire_gateway.kube_api import KubeApi, KubeError
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.by_load import RoundRobin
from tests.gateway.kube_stub import NAMESPACE, endpoint_slice


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *args):
        pass


@pytest.fixture
def page(tmp_path):
    with HttpServer(("127.0.0.1", 0), Page) as server:
        server.directory = tmp_path
        server.start()
        yield server
        server.stop()


class World:
    def __init__(self, kube, table):
        self.kube, self.table = kube, table

    async def until(self, *uids):
        """Wait until these are the replicas."""
        async with asyncio.timeout(30):
            while {one.endpoint.uid for one in self.table.replicas()} != set(uids):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def informed(kube, directory, resync=300.0):
    (directory / "token").write_text("t0ken")
    table = ReplicaTable((NAMESPACE,), 8001, time.monotonic, lambda _: RoundRobin())
    informer = Informer(KubeApi(kube.url, directory), ENDPOINT_SLICES, table, NAMESPACE, resync)
    running = asyncio.ensure_future(informer.run())
    try:
        yield World(kube, table)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def watches(kube):
    return [query for query in kube.requests if "watch" in query]


async def test_slices_that_come_change_and_go_are_followed_over_one_watch(kube, tmp_path):
    kube.put(endpoint_slice("s1", {"a": "10.0.0.1"}))
    async with informed(kube, tmp_path) as world:
        await world.until("a")
        kube.put(endpoint_slice("s2", {"b": "10.0.0.2"}))
        await world.until("a", "b")
        kube.put(endpoint_slice("s1", {"c": "10.0.0.3"}))
        await world.until("b", "c")
        kube.bookmark()
        kube.remove("s2")
        await world.until("c")
    assert len(kube.requests) == 2  # one list, one watch
    assert {query["labelSelector"] for query in kube.requests} == {"serving.quire.dev/name"}


async def test_a_version_that_is_too_old_is_answered_by_a_new_list(kube, tmp_path):
    kube.put(endpoint_slice("s1", {"a": "10.0.0.1"}))
    async with informed(kube, tmp_path) as world:
        await world.until("a")
        kube.forget("s2", endpoint_slice("s2", {"b": "10.0.0.2"}))
        kube.expire()
        await world.until("a", "b")


async def test_an_event_that_was_lost_is_made_up_for_by_the_next_list(kube, tmp_path, monkeypatch):
    monkeypatch.setattr("quire_gateway.kube_api.WATCH_SECONDS", 1 - 15)  # the watch ends after a second
    kube.put(endpoint_slice("s1", {"a": "10.0.0.1"}))
    async with informed(kube, tmp_path, resync=0.5) as world:
        await world.until("a")
        kube.forget("s2", endpoint_slice("s2", {"b": "10.0.0.2"}))
        await world.until("a", "b")


async def test_a_page_of_html_in_place_of_a_list_is_a_refusal(page):
    """Of a proxy in between."""
    async with KubeApi(page.url, page.directory).connect() as connection:
        with pytest.raises(KubeError, match="this is not JSON"):
            await connection.list(ENDPOINT_SLICES.path(NAMESPACE), "")
