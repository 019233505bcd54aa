"""Sends requests to external backends: with the backend's key, over TLS, and never anywhere else.

What leaves the cluster is made here, all of it: the body without fields of our own, a few headers of which
none is the client's but two, and the key. Addresses are checked when they are connected to, redirects are not
followed, and errors that are about the account there are not shown to clients.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

from quire_gateway.attempt import Attempt, AttemptError, UpstreamRequest
from quire_gateway.external_models import ExternalModel
from quire_gateway.external_secrets import ExternalSecrets, SecretError
from quire_gateway.llm_external_backend import LLMExternalBackend
from quire_gateway.openai.external import request_body
from quire_gateway.outlier_detection import Verdict
from quire_gateway.public_addresses import AddressGuard
from quire_gateway.replica import Replica
from quire_gateway.sessions import Sessions
from quire_http.errors import ApiError
from quire_http.rate_limit import RateLimits, Rates

_REQUEST_HEADERS = ("accept", "content-type")
_RESPONSE_HEADERS = frozenset((b"cache-control", b"content-encoding", b"content-type", b"x-accel-buffering"))
_TYPES = frozenset(("application/json", "text/event-stream"))
_NO_ROOM = frozenset((429, 529))
#: What says that the backend is not asked as it should be, by its object or its key.
_MISCONFIGURED = frozenset((401, 402, 403, 404, 405, 407, 421))


class ExternalUpstream:
    """The connections to all backends of one gateway. ``num_gateways``: those that run now."""

    response_headers = _RESPONSE_HEADERS

    def __init__(
        self,
        guard: AddressGuard,
        secrets: ExternalSecrets,
        num_gateways: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secrets = secrets
        self._num_gateways = num_gateways
        self._limits: dict[str, int | None] = {}  # requests a minute, by the backend's UID
        self._rates = Rates(self._limits_of, clock)
        self._sessions = Sessions(guard.socket)

    async def close(self) -> None:
        """Close all connections."""
        await self._sessions.close()

    async def post(
        self, replica: Replica, request: UpstreamRequest, attempt: Attempt
    ) -> aiohttp.ClientResponse:
        """The head of the answer. Raises AttemptError where nothing is sent."""
        assert isinstance(attempt.model, ExternalModel)
        backend = attempt.model.backend
        try:
            key = self._secrets.key(backend)
            tls = _tls(backend.ca_bundle)
        except SecretError as error:
            raise AttemptError("no_key", str(error)) from None
        except (ssl.SSLError, ValueError) as error:
            raise AttemptError("ca_bundle", f"spec.caBundle cannot be read: {error}") from None
        body = request_body(request.body, backend.model)
        self._take(backend)
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        headers |= {"accept-encoding": "identity", "user-agent": "quire-gateway"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        url = URL(backend.base_url + request.path.removeprefix("/v1"), encoded=True)
        return await self._sessions.request("POST", url, body, headers, tls)

    def check(self, response: aiohttp.ClientResponse, attempt: Attempt) -> None:
        """Raise AttemptError for all that is neither an answer nor the client's own error."""
        status = response.status
        if status in _NO_ROOM:
            attempt.verdict = Verdict.UNKNOWN
            raise AttemptError("rate_limited", f"it has no room: HTTP {status}")
        if status >= 500:
            raise attempt.failed(f"http_{status}", f"HTTP {status}")
        if status in _MISCONFIGURED:
            raise attempt.failed("unauthorized", f"it refuses this gateway: HTTP {status}")
        if 300 <= status < 400:
            raise attempt.failed("redirect", f"it redirects, which is not followed: HTTP {status}")
        if response.content_type not in _TYPES:
            raise attempt.failed("no_answer", f"it sends no answer, but {response.content_type!r}")

    def _take(self, backend: LLMExternalBackend) -> None:
        """Count a request of its limit. Raises AttemptError where there is none left."""
        self._limits[backend.uid] = backend.requests_per_minute
        try:
            self._rates.charge(backend.uid, 0)
        except ApiError as error:
            message = f"spec.requestsPerMinute of LLMExternalBackend {backend.name}: {error}"
            raise AttemptError("rate_limited", message) from None

    def _limits_of(self, uid: str) -> RateLimits:
        return RateLimits(self._limits[uid], None, 1 / max(self._num_gateways(), 1))


@functools.lru_cache(maxsize=64)
def _tls(ca_bundle: str) -> ssl.SSLContext:
    """Of connections that are verified. Raises ssl.SSLError, ValueError."""
    return ssl.create_default_context(cadata=ca_bundle or None)
