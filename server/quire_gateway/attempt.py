"""One request to one replica or external backend, the only way to it: counted there until it is closed.

The connections are those of `sessions`, which are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import aiohttp
from yarl import URL

from quire_gateway.outlier_detection import Verdict
from quire_gateway.replica import Replica
from quire_gateway.replicas import Model
from quire_gateway.request_signing import TOKEN_HEADER, Identity, RequestSigner
from quire_gateway.sessions import Sessions
from quire_gateway.settings import Timeouts
from quire_gateway.tracing import AttemptSpan
from quire_http.dialects import RESPONSES

_CHECKS_PER_TIMEOUT = 4

#: Says what the ids of responses begin with, so that later requests about them come back.
REPLICA_HEADER = "x-quire-replica"
#: Of an answer's headers those that go to the client.
RESPONSE_HEADERS = frozenset(
    (
        *(b"cache-control", b"content-encoding", b"content-type", b"retry-after", b"server-timing"),
        *(b"x-accel-buffering", b"x-quire-degraded", b"x-quire-ignored"),
    )
)
#: Bytes of an answer that are read before the first of them is sent.
MAX_WHOLE_BYTES = 1 << 20


class AttemptError(Exception):
    """The replica did not answer, or not to the end. ``reason`` is a label of metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UpstreamRequest(NamedTuple):
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

    #: Of the headers of answers those that go to the client, in lower case.
    response_headers: frozenset[bytes]

    async def post(
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt
    ) -> aiohttp.ClientResponse:
        """The head of the answer. Raises aiohttp.ClientError, AttemptError."""

    def check(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        """Raise AttemptError where this answer is none for the client."""


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
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt
    ) -> aiohttp.ClientResponse:
        """The head of the answer, to a signed request."""
        headers = dict(request.headers)
        if self._signer is not None:  # for each attempt: a token is short-lived
            token = self._signer.token(attempt.model.audience, request.identity, request.asked_model)
            headers[TOKEN_HEADER] = token
        if request.path == RESPONSES:
            headers[REPLICA_HEADER] = replica.endpoint.hint
        url = URL(replica.endpoint.url + request.path, encoded=True)
        return await self._sessions.request(request.method, url, request.body, headers)

    def check(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        """No client's key goes there: with a 401 it is this gateway that is refused."""
        if response.status == 401:
            raise attempt.failed("unauthorized", "it does not accept requests of this gateway")


def _kind(error: aiohttp.ClientError) -> str:
    """For messages. The error itself may have the request's headers, and so its key and its token."""
    return type(error).__name__


class Attempt:
    """A context manager: what has begun in it is ended with it. ``is_copy``: it is not to say whether
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

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
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
            request = request._replace(headers={**request.headers, **self._span.headers()})
        seconds = self._timeouts.first_byte if request.stream else self._timeouts.whole
        try:
            async with asyncio.timeout(seconds):
                self._response = await self._upstream.post(self._replica, request, self)
        except aiohttp.ClientConnectorError as error:
            raise self.failed("connect", f"it cannot be connected to: {error}") from None
        except TimeoutError:
            raise self.failed("timeout", f"it did not answer within {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise self.failed("reset", f"the connection failed before the answer: {_kind(error)}") from None
        if not 200 <= self._response.status < 600:  # 101 would make a tunnel of the client's connection
            raise self.failed("no_answer", f"it answers with HTTP {self._response.status}")
        self._upstream.check(self._response, self)
        self.verdict = Verdict.SUCCESS if self._response.status < 500 else Verdict.FAILURE
        return self._response

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
