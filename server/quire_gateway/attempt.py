"""One request to one replica or external backend, the only way to it: counted there until it is closed.

aiohttp keeps the connections. One that was used before may be closed by the replica in the moment in which it
is used again; the request is then sent once more, over a new one, and neither is a failure.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
from aiohttp.connector import AddrInfoType, Connection
from yarl import URL

from quire_gateway.outlier_detection import Verdict
from quire_gateway.replica import Replica
from quire_gateway.replicas import Model
from quire_gateway.request_signing import TOKEN_HEADER, Identity, RequestSigner
from quire_gateway.settings import Timeouts
from quire_gateway.tracing import AttemptSpan
from quire_http.dialects import RESPONSES

# A host that does not answer is given up after so many further packets, by the kernel, within 3 s. A timer of
# the event loop would count the time in which the loop itself is busy, and take a burst of clients for a lost
# host.
_CONNECT_RETRANSMISSIONS = 1
_POOL_SECONDS = 15.0  # the replicas keep idle connections for longer
_NO_OWN_HEADERS = frozenset(("accept", "accept-encoding", "content-type", "user-agent"))
_CHECKS_PER_TIMEOUT = 4

#: Says what the ids of responses begin with, so that later requests about them come back.
REPLICA_HEADER = "x-quire-replica"
#: Of an answer's headers those that go to the client.
RESPONSE_HEADERS = frozenset(
    (
        *("cache-control", "content-encoding", "content-type", "retry-after", "server-timing"),
        *("x-accel-buffering", "x-quire-degraded", "x-quire-ignored"),
    )
)
#: Bytes of an answer that are read before the first of them is sent.
MAX_WHOLE_BYTES = 1 << 20


@dataclass(slots=True)
class _Origin:
    """Of a connection: made for the request that has it, or used before. Tasks that connect share it."""

    is_new: bool = False


_origin: ContextVar[_Origin | None] = ContextVar("_origin", default=None)  # of the task's last request


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
    is_hedgeable: bool = False  # two replicas may compute it, of which one is given up
    kept_by: str | None = None  # the hint of the one replica that may be asked
    method: str = "POST"


class Upstream(Protocol):
    """Connections, and what is sent over them."""

    #: Of the headers of answers those that go to the client.
    response_headers: frozenset[str]

    async def post(
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt, *, is_new: bool
    ) -> aiohttp.ClientResponse:
        """The head of the answer. ``is_new``: over a new connection."""

    def check(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        """Raise AttemptError where this answer is none for the client."""


def make_socket(address: AddrInfoType) -> socket.socket:
    """That of a connection to an address."""
    family, kind, protocol, _, _ = address
    return socket.socket(family, kind, protocol)


class Sessions:
    """Connections that are kept for the next request, and those that are not."""

    def __init__(self, make_socket: Callable[[AddrInfoType], socket.socket] = make_socket) -> None:
        def limited(address: AddrInfoType) -> socket.socket:
            if (origin := _origin.get()) is not None:
                origin.is_new = True
            made = make_socket(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _CONNECT_RETRANSMISSIONS)
            return made

        self._pooled = _session(_Connector(limit=0, socket_factory=limited, keepalive_timeout=_POOL_SECONDS))
        self._single = _session(_Connector(limit=0, socket_factory=limited, force_close=True))

    def session(self, *, is_new: bool) -> aiohttp.ClientSession:
        """The one for a request. ``is_new``: over a new connection."""
        return self._single if is_new else self._pooled

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._single.close()


class ReplicaUpstream:
    """The connections to all replicas."""

    response_headers = RESPONSE_HEADERS

    def __init__(self, signer: RequestSigner | None = None) -> None:
        self._signer = signer
        self._sessions = Sessions()

    async def close(self) -> None:
        """Close all connections."""
        await self._sessions.close()

    async def post(
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt, *, is_new: bool
    ) -> aiohttp.ClientResponse:
        """The head of the answer, to a signed request."""
        session = self._sessions.session(is_new=is_new)
        url = URL(replica.endpoint.url + request.path, encoded=True)
        headers = request.headers
        if self._signer is not None:  # for each attempt: a token is short-lived
            token = self._signer.token(attempt.model.audience, request.identity, request.asked_model)
            headers = {**headers, TOKEN_HEADER: token}
        if request.path == RESPONSES:
            headers = {**headers, REPLICA_HEADER: replica.endpoint.hint}
        return await session.request(
            request.method, url, data=request.body, headers=headers, allow_redirects=False
        )

    def check(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        """No client's key goes there: with a 401 it is this gateway that is refused."""
        if response.status == 401:
            raise attempt.failed("unauthorized", "it does not accept requests of this gateway")


class _Connector(aiohttp.TCPConnector):
    """Notes for which request a connection is made, and which gets one that was used before. aiohttp's
    tracing says so, too, at a tenth of all that a request costs.
    """

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """A connection for a request of the present task."""
        _origin.set(_Origin())
        return await super().connect(req, traces, timeout)


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NO_OWN_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),
    )


def _kind(error: aiohttp.ClientError) -> str:
    """For messages. The error itself may have the request's headers, and so its key and its token."""
    return type(error).__name__


class Attempt:
    """An async context manager: what has begun in it is ended with it. ``is_copy``: it is not to say whether
    the replica is well. ``span``: of this attempt, where traces are exported; it ends with it.
    """

    def __init__(
        self,
        upstream: Upstream,
        model: Model,
        replica: Replica,
        timeouts: Timeouts,
        *,
        is_copy: bool = False,
        span: AttemptSpan | None = None,
    ) -> None:
        self.verdict = Verdict.UNKNOWN
        self._upstream = upstream
        self._timeouts = timeouts
        self.model = model
        self._replica = replica
        self.response_headers = upstream.response_headers
        self._response: aiohttp.ClientResponse | None = None
        self._whole: bytes | None = None
        self._reading_since: float | None = None
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None
        replica.in_flight += 1
        self._is_copy = is_copy
        self._span = span
        self._failure = ""
        if not is_copy:
            model.outliers.begin(replica.endpoint.uid)

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the connection, unless the whole answer was read: then it is kept already."""
        if self._span is not None:
            self._end_span(self._span, error)
        if self._timer is not None:
            self._timer.cancel()
        if self._response is not None:
            self._response.close()
        self._replica.in_flight -= 1
        if not self._is_copy:
            self.model.outliers.end(self._replica.endpoint.uid, self.verdict, self.model.replicas)

    async def ask(self, request: UpstreamRequest) -> aiohttp.ClientResponse:
        """Send the request; returns with the head of the answer. Raises AttemptError."""
        if self._span is not None:
            request = replace(request, headers={**request.headers, **self._span.headers()})
        seconds = self._timeouts.first_byte if request.stream else self._timeouts.whole
        try:
            async with asyncio.timeout(seconds):
                self._response = await self._ask(request)
        except aiohttp.ClientConnectorError as error:
            raise self.failed("connect", f"it cannot be connected to: {error}") from None
        except TimeoutError:
            raise self.failed("timeout", f"it did not answer within {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise self.failed("reset", f"the connection failed before the answer: {_kind(error)}") from None
        self._upstream.check(self._response, self)
        self.verdict = Verdict.SUCCESS if self._response.status < 500 else Verdict.FAILURE
        return self._response

    async def _ask(self, request: UpstreamRequest) -> aiohttp.ClientResponse:
        try:
            return await self._upstream.post(self._replica, request, self, is_new=False)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            origin = _origin.get()
            is_new = origin is None or origin.is_new
            if is_new or isinstance(error, aiohttp.ClientConnectorError):
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
            raise self.failed("cut", f"the answer was cut: {_kind(error)}") from None
        finally:
            self._reading_since = None

    async def read_whole(self) -> bytes:
        """All that is left of an answer that is not long, the same each time. Raises AttemptError."""
        if self._whole is not None:
            return self._whole
        parts, length = [], 0
        while data := await self.read():
            parts.append(data)
            length += len(data)
            if length > MAX_WHOLE_BYTES:
                raise self.failed("too_long", f"its answer is longer than {MAX_WHOLE_BYTES} bytes")
        self._whole = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._whole

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
        self.verdict, self._failure = Verdict.FAILURE, reason
        return AttemptError(reason, f"{self._replica.endpoint.url}: {message}")

    def _end_span(self, span: AttemptSpan, error: BaseException | None) -> None:
        status = None if self._response is None else self._response.status
        reason = error.reason if isinstance(error, AttemptError) else self._failure
        if not reason and status is not None and status >= 400:
            reason = f"http_{status}"
        outcome = reason or ("success" if error is None else "cancelled")
        span.end({"http.response.status_code": status, "quire.status": outcome}, reason)
