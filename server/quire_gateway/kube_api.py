"""Lists, watches and writes of the Kubernetes API, over plain aiohttp with the pod's ServiceAccount.

Token and CA are read again and again, because the kubelet renews both. Knows no kind of object.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

Body = dict[str, Any]

#: A watch ends by itself after so long, and is resumed: a connection that died unseen is noticed then.
WATCH_SECONDS = 60
_LATE_SECONDS = 15
_LIST_SECONDS = 30
_CONNECT_SECONDS = 5
_PAGE = "500"


class KubeError(Exception):
    """The API server refused, or said what is no answer to the request."""


class GoneError(KubeError):
    """The version to watch from is too old: list again."""


class MissingError(KubeError):
    """There is nothing at this path."""


class ConflictError(KubeError):
    """The object is newer than the version that was to be changed."""


#: How requests to the API server fail: it refuses, is away or too slow, or the credentials are not there.
FAILURES = (KubeError, aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True)
class KubeApi:
    """The API server, and the directory with this pod's credentials."""

    url: str
    service_account: Path

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Connections with the CA of now."""
        authority = self.service_account / "ca.crt"
        tls = ssl.create_default_context(cafile=authority) if self.url.startswith("https") else True
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
            yield Connection(session, self.url, self.service_account / "token")


class Connection:
    """Requests to the API server. Raises FAILURES."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: Path) -> None:
        self._session = session
        self._url = url
        self._token = token

    async def list(self, path: str, selector: str) -> tuple[list[Body], str]:
        """All objects, and the version of the list."""
        items: list[Body] = []
        query = {"labelSelector": selector, "limit": _PAGE}
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS, sock_connect=_CONNECT_SECONDS)
        while True:
            async with self._request("GET", path, timeout, query) as response:
                answer = _object(await response.read())
            items += answer.get("items") or []
            metadata = answer.get("metadata") or {}
            if not (following := metadata.get("continue")):
                return items, str(metadata.get("resourceVersion"))
            query["continue"] = following

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[Body]:
        """The events from a version on, bookmarks too, until the watch ends by itself."""
        query = {
            "labelSelector": selector,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=WATCH_SECONDS + _LATE_SECONDS, sock_connect=_CONNECT_SECONDS)
        async with self._request("GET", path, timeout, query) as response:
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    yield _event(line)

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = ""
    ) -> Body:
        """One request that changes something; what the API server answers."""
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS, sock_connect=_CONNECT_SECONDS)
        data = None if body is None else orjson.dumps(body)
        async with self._request(method, path, timeout, data=data, content_type=content_type) as response:
            return _object(await response.read())

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        timeout: aiohttp.ClientTimeout,
        query: Mapping[str, str] | None = None,
        *,
        data: bytes | None = None,
        content_type: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"accept": "application/json"} | ({"content-type": content_type} if content_type else {})
        with contextlib.suppress(FileNotFoundError):  # an API server that asks for none, behind kubectl proxy
            headers["authorization"] = f"Bearer {self._token.read_text(encoding='ascii').strip()}"
        async with self._session.request(
            method, self._url + path, params=query, data=data, headers=headers, timeout=timeout
        ) as response:
            try:
                if response.status == 410:
                    raise GoneError
                if not response.ok:
                    kind = {404: MissingError, 409: ConflictError}.get(response.status, KubeError)
                    raise kind(f"{path}: HTTP {response.status} {(await response.text())[:200]}")
                yield response
            finally:
                # Left before its end. TLS would wait for the server's farewell first, for up to 30 seconds.
                if response.connection is not None and response.connection.transport is not None:
                    response.connection.transport.abort()


def _event(line: bytes) -> Body:
    event = _object(line)
    body = event.get("object")
    if event.get("type") == "ERROR" or not isinstance(body, dict):
        if isinstance(body, dict) and body.get("code") == 410:
            raise GoneError
        raise KubeError(f"the watch failed: {line[:200]!r}")
    return event


def _object(text: bytes) -> Body:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise KubeError(f"this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise KubeError(f"this is no object: {text[:200]!r}")
    return value
