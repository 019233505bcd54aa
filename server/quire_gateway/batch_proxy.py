"""Passes files, batches and jobs on to quire-batch, with a token that says whose they are.

The client's key is checked here and goes no further. Bodies and answers are passed on while they come, files
of any length: quire-batch has their limits.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from quire_gateway.delegation import DELEGATION_HEADER, Delegations
from quire_gateway.request_signing import LIFETIME_SECONDS, TOKEN_HEADER, RequestSigner
from quire_http.asgi import Scope
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import MAX_BODY_BYTES, ClientGoneError, HttpExchange

AUDIENCE = "quire-batch"
#: What is passed on: nothing else of quire-batch is reached from here.
_PATH = re.compile(rb"/v1/(files|batches|jobs)(/[A-Za-z0-9_-]{1,64}(/(content|cancel))?)?")
_METHODS = ("GET", "POST", "DELETE")
_REQUEST_HEADERS = frozenset(("accept", "content-length", "content-type", "traceparent", "tracestate"))
_RESPONSE_HEADERS = frozenset(
    (
        *("allow", "content-length", "content-type", "retry-after"),
        *("x-content-type-options", "x-should-retry"),
    )
)
_CONNECT_SECONDS, _READ_SECONDS = 2.0, 60.0
_RETRY_AFTER_SECONDS = 5
#: Of a body that is no file: the longest is that of a job, a request with its frame.
MOST_BYTES = MAX_BODY_BYTES + 4096


class BatchProxy:
    """The connections to quire-batch."""

    def __init__(self, url: str, signer: RequestSigner, delegations: Delegations) -> None:
        self._url = url.rstrip("/")
        self.delegations = delegations
        self._signer = signer
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def serves(self, scope: Scope) -> bool:
        """Whether a request is for quire-batch."""
        return _PATH.fullmatch(scope["raw_path"]) is not None

    async def forward(self, exchange: HttpExchange, client: str, key_hash: str) -> int:
        """Answer a request of this client; the status of the answer. Raises ApiError."""
        scope = exchange.scope
        if scope["method"] not in _METHODS:
            allowed = (("allow", ", ".join(_METHODS)),)
            raise ApiError(405, f"{scope['path']} is not for {scope['method']}.", headers=allowed)
        query = scope["query_string"].decode("latin-1")
        url = self._url + scope["raw_path"].decode("ascii") + (f"?{query}" if query else "")
        most = None if scope["path"] == "/v1/files" else MOST_BYTES
        body = _Body(exchange, most) if scope["method"] == "POST" else None
        headers = self._headers(scope, client, key_hash)
        if body is None:  # what is announced and does not come would be taken out of the next request
            headers.pop("content-length", None)
        try:
            async with self._session.request(
                scope["method"],
                URL(url, encoded=True),
                data=None if body is None else body.parts(),
                headers={**headers, "x-request-id": exchange.request_id},
                allow_redirects=False,
            ) as response:
                await _pass_on(exchange, response)
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            if body is not None and body.error is not None:
                raise body.error from None
            if exchange.started:
                raise ClientGoneError from None  # what has begun cannot become an error any more
            message = "Files, batches and jobs cannot be reached now; ask again."
            raise overloaded("batch_unavailable", message, _RETRY_AFTER_SECONDS) from None

    def _headers(self, scope: Scope, client: str, key_hash: str) -> dict[str, str]:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        headers = {name: value for name, value in given.items() if name in _REQUEST_HEADERS}
        claims = {"aud": AUDIENCE, "client": client}
        headers[TOKEN_HEADER] = self._signer.signed(claims, LIFETIME_SECONDS)
        if scope["method"] == "POST":  # what may create work
            headers[DELEGATION_HEADER] = self.delegations.delegation(key_hash)
        return headers


class _Body:
    """A request's body while it comes, ``most`` bytes of it. ``error``: why it did not. Raises ApiError where
    it is announced to be longer.
    """

    def __init__(self, exchange: HttpExchange, most: int | None) -> None:
        self._exchange = exchange
        self._most = most
        announced = [int(value) for name, value in exchange.scope["headers"] if name == b"content-length"]
        if most is not None and announced and announced[0] > most:
            raise _too_long(most)
        self.error: Exception | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """Its bytes."""
        try:
            size = 0
            async for part in self._exchange.body_parts():
                size += len(part)
                if self._most is not None and size > self._most:
                    raise _too_long(self._most)
                yield part
        except (ApiError, ClientGoneError) as error:
            self.error = error
            raise


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"The body is longer than {most} bytes.", code="body_too_long")


async def _pass_on(exchange: HttpExchange, response: aiohttp.ClientResponse) -> None:
    if response.status == 401:  # no client's key goes there: it is this gateway that is refused
        message = "The batch server does not accept requests of this gateway."
        raise ApiError(502, message, kind="server_error", code="gateway_refused")
    kept = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.headers.items()
        if name.lower() in _RESPONSE_HEADERS
    ]
    await exchange.begin(response.status, kept)
    async for part in response.content.iter_any():
        await exchange.part(part)
    await exchange.end()
