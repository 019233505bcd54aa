"""A minimal API server for the unit tests: stores plain dicts by path and records every request.

Apply replaces the object; there are no schemas and no defaults. Tests that depend on those use a real API
server.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from quire_operator.cluster import Connection

Body = dict[str, Any]


_NAMESPACE = re.compile("/namespaces/[^/]+")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    content_type: str
    body: Any
    authorization: str


@dataclass
class FakeApi:
    """`answers` overrides what a (method, path) gets: a status and a message."""

    objects: dict[str, Body] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    answers: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    version: int = 100
    page: int = 1000

    def put(self, path: str, body: Body) -> Body:
        self.version += 1
        old = self.objects.get(path, {}).get("metadata", {})
        metadata = {"uid": old.get("uid", f"uid-{self.version}"), **body["metadata"]}
        self.objects[path] = {**body, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        return self.objects[path]

    def writes(self) -> list[str]:
        return [f"{r.method} {r.path}" for r in self.requests if r.method != "GET"]

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.text()
        seen = Request(
            request.method,
            request.path,
            dict(request.query),
            request.headers.get("Content-Type", ""),
            json.loads(raw) if raw else None,
            request.headers.get("Authorization", ""),
        )
        self.requests.append(seen)
        status, answer = self._answer(seen)
        return web.json_response(answer, status=status)

    def _answer(self, request: Request) -> tuple[int, Body]:
        if (request.method, request.path) in self.answers:
            status, message = self.answers[request.method, request.path]
            return status, {"kind": "Status", "message": message}
        path = request.path.removesuffix("/status")
        known = self.objects.get(path)
        if request.method == "GET" and known is None:
            return self._list(request)
        if request.method == "GET":
            return 200, known or {}
        if request.method == "DELETE":
            return (200, {"kind": "Status"}) if self.objects.pop(path, None) else (404, {"message": "gone"})
        if request.method == "POST":
            return 201, self.put(f"{path}/{request.body['metadata']['name']}", request.body)
        if request.content_type == "application/apply-patch+yaml":
            return 200, self.put(path, request.body)
        if known is None:
            return 404, {"message": "not found"}
        wanted = request.body.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, known["metadata"]["resourceVersion"]):
            return 409, {"message": "the object has been modified"}
        if request.path == path:
            return 200, self.put(path, merged(known, request.body))
        status = merged(known.get("status", {}), request.body["status"])
        return 200, self.put(path, {**known, "status": status})

    def _list(self, request: Request) -> tuple[int, Body]:
        everywhere = "/namespaces/" not in request.path
        below = sorted(
            p
            for p in self.objects
            if (_NAMESPACE.sub("", p) if everywhere else p).startswith(request.path + "/")
        )
        if not request.path.endswith("s") or request.path.count("/") > 7:
            return 404, {"message": "not found"}
        start = int(request.query.get("continue", 0))
        items = [
            {k: v for k, v in self.objects[p].items() if k not in ("kind", "apiVersion")}
            for p in below[start : start + self.page]
        ]
        more = {"continue": str(start + self.page)} if start + self.page < len(below) else {}
        return 200, {"metadata": {"resourceVersion": str(self.version), **more}, "items": items}


def merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch applied, as RFC 7386 has it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def unexpected(body: dict[str, Any], why: str) -> None:
    raise AssertionError(f"{body} cannot be read: {why}")


@asynccontextmanager
async def connected(api: FakeApi, token: str = "") -> AsyncIterator[Connection]:
    """A Connection to the fake."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(app) as server:
        configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
        if token:
            configuration.api_key["BearerToken"] = f"bearer {token}"
        connection = Connection(configuration, report=unexpected)
        try:
            yield connection
        finally:
            await connection.close()
