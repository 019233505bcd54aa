"""One request to one replica, the only way to it: counted there from its beginning until it is closed.

aiohttp keeps the connections. One that was used before may be closed by the replica in the moment in which it
is used again; the request is then sent once more, over a new one, and neither is a failure.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from quire_gateway.outlier_detection import Verdict
from quire_gateway.replica import Replica
from quire_gateway.replicas import Model
from quire_gateway.request_signing import TOKEN_HEADER, Identity, RequestSigner
from quire_gateway.settings import Timeouts

_CONNECT_SECONDS = 1.0
_POOL_SECONDS = 15.0  # the replicas keep idle connections for longer
_NO_OWN_HEADERS = frozenset(("accept", "accept-encoding", "content-type", "user-agent"))
_CHECKS_PER_TIMEOUT = 4


class AttemptError(Exception):
    """The replica did not answer, or not to the end. ``reason`` is a label of metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent to a replica."""

    path: str
    headers: Mapping[str, str]
    body: bytes | bytearray
    stream: bool
    asked_model: str = ""  # the name by which the client asked
    identity: Identity = Identity()
    is_resumable: bool = False  # another replica can go on with its stream


class Upstream:
    """The connections to all replicas."""

    def __init__(self, signer: RequestSigner | None = None) -> None:
        self._signer = signer
        self._pooled = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_POOL_SECONDS))
        self._single = _session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._single.close()

    async def post(
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt, *, is_new: bool
    ) -> aiohttp.ClientResponse:
        """The head of the answer. ``is_new``: over a new connection."""
        session = self._single if is_new else self._pooled
        url = URL(replica.endpoint.url + request.path, encoded=True)
        headers = request.headers
        if self._signer is not None:  # for each attempt: a token is short-lived
            token = self._signer.token(attempt.model.audience, request.identity, request.asked_model)
            headers = {**headers, TOKEN_HEADER: token}
        return await session.post(
            url, data=request.body, headers=headers, allow_redirects=False, trace_request_ctx=attempt
        )


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reused)
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_OWN_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        trace_configs=[tracing],
    )


async def _note_reused(
    session: aiohttp.ClientSession,
    context: types.SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


class Attempt:
    """An async context manager: what has begun in it is ended with it."""

    def __init__(self, upstream: Upstream, model: Model, replica: Replica, timeouts: Timeouts) -> None:
        self.is_reused = False  # the connection; set by the trace
        self.verdict = Verdict.UNKNOWN
        self._upstream = upstream
        self._timeouts = timeouts
        self.model = model
        self._replica = replica
        self._response: aiohttp.ClientResponse | None = None
        self._reading_since: float | None = None
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None
        replica.in_flight += 1
        model.outliers.begin(replica.endpoint.uid)

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the connection, unless the whole answer was read: then it is kept already."""
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.close()
        self._replica.in_flight -= 1
        self.model.outliers.end(self._replica.endpoint.uid, self.verdict, self.model.replicas)

    async def ask(self, request: UpstreamRequest) -> aiohttp.ClientResponse:
        """Send the request; returns with the head of the answer. Raises AttemptError."""
        seconds = self._timeouts.first_byte if request.stream else self._timeouts.whole
        try:
            async with asyncio.timeout(seconds):
                self._response = await self._ask(request)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self.failed("connect", f"it cannot be connected to: {error}") from None
        except TimeoutError:
            raise self.failed("timeout", f"it did not answer within {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise self.failed("reset", f"the connection failed before the answer: {error!r}") from None
        if self._response.status == 401:  # no client's key goes there: it is this gateway that is refused
            raise self.failed("unauthorized", "it does not accept requests of this gateway")
        self.verdict = Verdict.SUCCESS if self._response.status < 500 else Verdict.FAILURE
        return self._response

    async def _ask(self, request: UpstreamRequest) -> aiohttp.ClientResponse:
        try:
            return await self._upstream.post(self._replica, request, self, is_new=False)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not self.is_reused or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._upstream.post(self._replica, request, self, is_new=True)

    async def read(self) -> bytes:
        """The next bytes of the answer, none at its end. Raises AttemptError where it is cut, or idle."""
        assert self._response is not None
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._check_idle(loop)
        self._reading_since = loop.time()
        try:
            return await self._response.content.readany()
        except aiohttp.ClientError as error:
            if self._is_late:
                raise self.failed("idle", f"it sent nothing for {self._timeouts.idle:g} s") from None
            raise self.failed("cut", f"the answer was cut: {error!r}") from None
        finally:
            self._reading_since = None

    async def read_whole(self) -> bytes:
        """All that is left of the answer. Raises AttemptError."""
        parts = []
        while data := await self.read():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connection where the replica is silent: while it is waited for, not while the client
        reads. A timer of its own for each part would cost more than the part.
        """
        idle = self._timeouts.idle
        since = self._reading_since
        if since is not None and loop.time() - since >= idle:
            self._is_late = True
            assert self._response is not None
            self._response.close()
        else:
            self._timer = loop.call_later(idle / _CHECKS_PER_TIMEOUT, self._check_idle, loop)

    def failed(self, reason: str, message: str) -> AttemptError:
        """The error of a replica that has failed."""
        self.verdict = Verdict.FAILURE
        return AttemptError(reason, f"{self._replica.endpoint.url}: {message}")
