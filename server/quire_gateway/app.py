"""The ASGI application: the relayed paths, the gateway's own ones, and the drain around both.

Plain ASGI, because each layer of a framework costs as much as the relay itself, and hides when a client hangs
up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_gateway.accounting import Account
from quire_gateway.attempt import UpstreamRequest
from quire_gateway.client_limits import ClientLimiter
from quire_gateway.dispatch import Destination, Dispatcher
from quire_gateway.llm_client import LLMClient
from quire_gateway.log import AccessLog
from quire_gateway.management import Management, not_found
from quire_gateway.metrics import Metrics
from quire_gateway.openai import calls
from quire_gateway.openai.calls import estimated_tokens, longest_answers
from quire_gateway.relay import CACHE_HEADER, REQUEST_HEADERS, TOKENS_HEADER, USAGE_HEADER, Relay
from quire_gateway.request_signing import Identity
from quire_gateway.response_cache import Recording, ResponseCache, cache_key
from quire_gateway.routing.router import RequestFacts
from quire_gateway.usage import Usage
from quire_http.asgi import Receive, Scope, Send
from quire_http.body_memory import BodyMemory
from quire_http.connection_age import closing, is_old, opened_at
from quire_http.drain import RETRY_AFTER_SECONDS, Drain
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import CutError, HttpExchange

_MAX_VALUES = 1 << 18  # JSON values of a body
_MANAGEMENT = frozenset(("/healthz", "/readyz", "/metrics"))


@dataclass(frozen=True)
class Gateway:
    """The application."""

    dispatcher: Dispatcher
    relay: Relay
    management: Management
    metrics: Metrics
    access_log: AccessLog
    drain: Drain
    limiter: ClientLimiter
    cache: ResponseCache
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    clock: Callable[[], float] = time.monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        is_last = self.drain.begun or is_old(scope)
        exchange = HttpExchange(scope, receive, closing(send) if is_last else send, self.body_memory)
        await exchange.serve(self._route(exchange))

    async def _route(self, exchange: HttpExchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if path not in _MANAGEMENT and self.drain.refuses(opened_at(exchange.scope)):
            raise overloaded("draining", "The gateway is going away; ask again.", RETRY_AFTER_SECONDS)
        if path in calls.PATHS:
            if method != "POST":
                raise ApiError(405, f"{path} is for POST.", headers=(("allow", "POST"),))
            await self._relay(exchange)
        elif method not in ("GET", "HEAD"):
            raise not_found(path)
        elif path in _MANAGEMENT:
            await self.management.get(exchange)
        else:
            await self.management.get_models(exchange, self._authenticate(exchange))

    async def _relay(self, exchange: HttpExchange) -> None:
        path = exchange.scope["path"]
        account = Account(path, exchange.request_id, self.metrics, self.access_log, self.clock)
        self.drain.num_requests += 1
        error: Exception | None = None
        try:
            await self._answer(exchange, account)
        except CutError as cut:
            error = cut
            message = "The gateway is going away before the answer is complete; ask again."
            raise overloaded("draining", message, RETRY_AFTER_SECONDS) from None
        except Exception as raised:
            error = raised
            raise
        finally:
            self.drain.num_requests -= 1
            account.end(error)

    async def _answer(self, exchange: HttpExchange, account: Account) -> None:
        client = self._authenticate(exchange)
        account.client = client.full_name if client is not None else ""
        body = await exchange.body(_MAX_VALUES)
        call = calls.read(exchange.scope["path"], body)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"]}
        destination = self.dispatcher.destination(call, given, client)
        account.model, account.stream = destination.model, call.stream
        account.deployment, account.arm = destination.replicas.name, destination.arm
        if destination.served_name != call.model:
            body = calls.with_model(body, call.model, destination.served_name)
        headers = {name: value for name, value in given.items() if name in REQUEST_HEADERS}
        headers |= {"x-request-id": exchange.request_id, USAGE_HEADER: "true"}
        account.prompt_tokens = estimated_tokens(call)
        if client is not None:
            account.reservation = self.limiter.reserve(
                client, account.prompt_tokens, longest_answers(call), destination.prices
            )
            exchange.headers += account.reservation.headers()
        identity = _identity(client)
        is_resumable = call.stream and call.is_exact
        if is_resumable:
            headers[TOKENS_HEADER] = "true"
        request = UpstreamRequest(
            exchange.scope["path"], headers, body, call.stream, call.model, identity, is_resumable
        )
        uid = client.uid if client is not None else ""
        if await self._answer_again(exchange, destination, request, uid, account, is_exact=call.is_exact):
            return
        salt = f"{identity.cache_scope}\0{call.cache_salt}"  # no client hits what another one has cached
        facts = RequestFacts(call.model, call.prompt, call.user, salt, exchange.scope["headers"])
        work = self.relay.relay(
            exchange,
            destination,
            request,
            facts,
            account,
            lambda: self.dispatcher.destination(call, given, self._authenticate(exchange)),
        )
        await exchange.run(work, self.drain.cut)
        recording = account.recording
        if recording is not None and (answer := recording.answer) is not None:
            self.cache.put(recording.key, answer, destination.cache_seconds)

    async def _answer_again(
        self,
        exchange: HttpExchange,
        destination: Destination,
        request: UpstreamRequest,
        uid: str,
        account: Account,
        *,
        is_exact: bool,
    ) -> bool:
        """Whether an answer was kept, and is sent. If not, this one is recorded where it may be kept."""
        if not destination.cache_seconds or not is_exact:
            return False
        model, version = destination.replicas.audience, destination.version
        key = cache_key(uid, model, version, request.path, request.body)
        if (answer := self.cache.get(key)) is None:
            account.recording = Recording(key)
            return False
        self.metrics.cache_hit(destination.model)
        account.deployment, account.usage, account.arm = "", Usage(0, 0), None
        account.answer_begins(200)
        exchange.headers.append((CACHE_HEADER, "hit"))
        await exchange.begin(200, answer.headers)
        await exchange.end(answer.body)
        return True

    def _authenticate(self, exchange: HttpExchange) -> LLMClient | None:
        """Whose request it is, before anything else of it is read."""
        if not self.management.is_ready():
            raise overloaded("starting", "The gateway is starting; ask again.", RETRY_AFTER_SECONDS)
        given = [value for name, value in exchange.scope["headers"] if name == b"authorization"]
        client = self.dispatcher.client(given[0] if len(given) == 1 else b"")
        exchange.client = client.full_name if client is not None else ""
        return client


def _identity(client: LLMClient | None) -> Identity:
    """What replicas take a client for: each has a cache of its own."""
    return Identity() if client is None else Identity(client.full_name, cache_scope=client.full_name)
