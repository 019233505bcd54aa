"""Delegated authentication and authorization, as every aggregated API server does them.

The API server's front proxy acts for its users; other clients send a bearer token, which the API server
reviews. The API server authorizes both. The rules are in `access`; this module sends the reviews and caches
results for ten seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire_metrics_adapter import access
from quire_metrics_adapter.access import Caller, FrontProxy
from quire_metrics_adapter.errors import ApiError, RefusedError
from quire_metrics_adapter.kube_api import Connection
from quire_metrics_adapter.queries import Query

logger = logging.getLogger(__name__)

T = TypeVar("T")

REMEMBER_SECONDS = 10.0
MAX_REMEMBERED = 4096
CONCURRENT_REVIEWS = 16
LOOK_SECONDS = 30.0  # to look for another front proxy
_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class ClientPeer:
    """The client by TLS. `common_name`: of a certificate from the front proxy's authority, None without
    one.
    """

    common_name: str | None
    headers: tuple[tuple[str, str], ...]


class DelegatedAuth:
    """`front_proxy` is None until it is known, and where the API server has none."""

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.monotonic) -> None:
        self.front_proxy: FrontProxy | None = None
        self.known = False
        self._connection = connection
        self._slots = asyncio.Semaphore(CONCURRENT_REVIEWS)
        self._callers = _Memory[Caller | None](clock)
        self._rights = _Memory[bool](clock)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Read the API server's front proxy configuration periodically; `changed` is called when it
        changes.
        """
        while True:
            try:
                found = access.front_proxy(await self._connection.request("GET", access.CONFIG_MAP))
            except (ApiError, ValueError) as error:
                logger.warning("cannot learn how the API server's front proxy shows itself: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if found is None and not self.known:
                logger.warning("the API server has no front proxy: only bearer tokens are accepted")
            if found != self.front_proxy or not self.known:
                self.front_proxy, self.known = found, True
                changed()
            await asyncio.sleep(LOOK_SECONDS)

    async def caller(self, peer: ClientPeer) -> Caller:
        """The user of a request; RefusedError 401 where it cannot be authenticated."""
        proxy = self.front_proxy
        if proxy is not None and peer.common_name is not None and proxy.allows(peer.common_name):
            caller = access.proxied_caller(peer.headers, proxy)
            if caller is not None:
                return caller
        token = _bearer(peer.headers)
        if token:
            key = hashlib.sha256(token.encode()).digest()
            holder = await self._callers.get(key, lambda: self._review_token(token))
            if holder is not None:
                return holder
        raise RefusedError(401, "Unauthorized", "Unauthorized")

    async def allow(self, caller: Caller, query: Query) -> None:
        """Return when `caller` may get it; RefusedError 403 when not."""
        if not await self._rights.get((caller, query), lambda: self._review_access(caller, query)):
            what = f"{query.metric} of {query.namespace}/{query.name}"
            raise RefusedError(403, "Forbidden", f"user {caller.user!r} may not get {what}")

    async def _review_token(self, token: str) -> Caller | None:
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        return access.reviewed_caller(await self._review(path, access.token_review(token)))

    async def _review_access(self, caller: Caller, query: Query) -> bool:
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return access.is_allowed(await self._review(path, access.access_review(caller, query)))

    async def _review(self, path: str, body: access.Document) -> access.Document:
        async with self._slots:
            try:
                return await self._connection.request("POST", path, body=body)
            except ApiError as error:
                logger.warning("cannot ask the API server who may ask us: %s", error)
                message = "the API server cannot be asked whether this is allowed"
                raise RefusedError(503, "ServiceUnavailable", message) from error


class _Memory(Generic[T]):
    """A cache for a few seconds, limited to MAX_REMEMBERED entries."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[Hashable, tuple[float, T]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        now = self._clock()
        known = self._answers.get(key)
        if known is not None and now - known[0] < REMEMBER_SECONDS:
            return known[1]
        answer = await ask()
        self._answers.pop(key, None)
        self._answers[key] = (now, answer)
        if len(self._answers) > MAX_REMEMBERED:
            del self._answers[next(iter(self._answers))]
        return answer


def _bearer(headers: Iterable[tuple[str, str]]) -> str:
    for name, value in headers:
        kind, _, token = value.partition(" ")
        if name.lower() == "authorization" and kind.lower() == "bearer":
            return token.strip()
    return ""
