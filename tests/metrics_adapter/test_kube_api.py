"""Requests and watches on the wire, with valid and broken responses of an API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from e2e.ports import free_port
from quire_metrics_adapter.errors import (
    ApiError,
    ConflictError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnreachableError,
)
from quire_metrics_adapter.kube_api import Connection
from quire_operator.json_decoder import Report

ADDED = b'{"type": "ADDED", "object": {"metadata": {}}}\n'
ERROR = b'{"type": "ERROR", "object": {"code": %d, "message": "x"}}\n'


@asynccontextmanager
async def connected(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    report: Report = lambda body, why: None,
) -> AsyncIterator[Connection]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    connection = Connection(configuration, report=report)
    try:
        yield connection
    finally:
        await connection.close()
        await runner.cleanup()


def sending(*parts: bytes, cut: bool = False) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if cut:
            assert request.transport is not None
            await asyncio.sleep(0.05)
            request.transport.abort()
        return response

    return answer


async def events(connection: Connection) -> list[str]:
    return [event["type"] async for event in connection.watch("/api/v1/pods", {})]


async def test_a_watch_reports_its_events_until_it_ends() -> None:
    async with connected(sending(ADDED[:10], ADDED[10:] + ADDED)) as connection:
        assert await events(connection) == ["ADDED", "ADDED"]


async def test_an_object_of_one_and_a_half_megabytes_is_read() -> None:
    large = b'{"type": "ADDED", "object": {"x": "%s"}}\n' % (b"x" * 1_500_000)
    async with connected(sending(large)) as connection:
        assert await events(connection) == ["ADDED"]


@pytest.mark.parametrize("last", [ADDED[:20], b"\n", b"[]\n", b'{"type": "ADDED"}\n'])
async def test_a_malformed_watch_event_is_an_unreachable_error(last: bytes) -> None:
    async with connected(sending(ADDED, last)) as connection:
        with pytest.raises(UnreachableError):
            await events(connection)


@pytest.mark.parametrize("depth", [1200, 9000])
async def test_an_object_nested_too_deep_is_named_and_the_others_are_read_as_always(depth: int) -> None:
    deep = b'{"metadata": {"name": "deep", "managedFields": %s}}' % (b"[" * depth + b"]" * depth)
    page = b'{"kind": "PodList", "metadata": {}, "items": [{"metadata": {"name": "a"}}, %s]}' % deep
    reported: list[str] = []

    def report(body: dict[str, Any], why: str) -> None:
        reported.append(body["metadata"]["name"])

    watched = sending(b'{"type": "ADDED", "object": %s}\n' % deep, ADDED)
    for answer in (watched, sending(page)):
        async with connected(
            answer, lambda body, why: reported.append(body["metadata"]["name"])
        ) as connection:
            if answer is watched:
                assert await events(connection) == ["ADDED", "ADDED"]
            else:
                found = await connection.request("GET", "/api/v1/pods")
                assert [item["metadata"]["name"] for item in found["items"]] == ["a", "deep"]
    assert reported == ["deep", "deep"]


async def test_a_connection_cut_during_a_watch_is_an_unreachable_error() -> None:
    async with connected(sending(ADDED, cut=True)) as connection:
        with pytest.raises(UnreachableError):
            await events(connection)


@pytest.mark.parametrize(("code", "error"), [(410, GoneError), (500, UnreachableError), (403, ApiError)])
async def test_an_error_event_in_a_watch_raises_the_error_of_its_code(
    code: int, error: type[ApiError]
) -> None:
    async with connected(sending(ADDED, ERROR % code)) as connection:
        with pytest.raises(error):
            await events(connection)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidError),
        (403, ApiError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (429, UnreachableError),
        (503, UnreachableError),
        (302, ApiError),
    ],
)
async def test_an_error_response_raises_the_error_of_its_status(status: int, error: type[ApiError]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "why"}, status=status, headers={"Location": "/elsewhere"})

    async with connected(answer) as connection:
        with pytest.raises(error, match="why") as raised:
            await connection.request("GET", "/api/v1/pods")
        assert type(raised.value) is error
        with pytest.raises(error):
            await events(connection)


async def test_a_refused_connection_is_an_unreachable_error_that_names_the_request() -> None:
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    connection = Connection(configuration)
    with pytest.raises(UnreachableError, match="GET /api/v1/pods: ClientConnector"):
        await connection.request("GET", "/api/v1/pods")
    await connection.close()


async def test_credentials_that_cannot_be_used_are_one_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubeconfig").write_text("clusters: []")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(ApiError, match="no credentials for the API server"):
        await Connection.open(lambda *_: None)
