"""The ASGI application: the relayed paths, the gateway's own ones, and the drain around both.

Plain ASGI, because each layer of a framework costs as much as the relay itself, and hides when a client hangs
up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from quire_gateway.accounting import Account
from quire_gateway.attempt import UpstreamRequest
from quire_gateway.batch_proxy import BatchProxy
from quire_gateway.classifier import Classifier
from quire_gateway.client_limits import Limiter
from quire_gateway.delegation import BATCH_PRIORITY
from quire_gateway.dispatch import Destination, Dispatcher
from quire_gateway.llm_client import LLMClient, key_hash
from quire_gateway.log import AccessLog
from quire_gateway.management import Management, not_found
from quire_gateway.metrics import Metrics
from quire_gateway.openai import calls
from quire_gateway.openai.calls import estimated_tokens, longest_answers
from quire_gateway.relay import CACHE_HEADER, REQUEST_HEADERS, TOKENS_HEADER, USAGE_HEADER, Relay
from quire_gateway.request_signing import NORMAL_PRIORITY, Identity
from quire_gateway.response_cache import Recording, ResponseCache, cache_key
from quire_gateway.routing.router import RequestFacts
from quire_gateway.shadow import ShadowTraffic
from quire_gateway.tracing import HEADERS as TRACE_HEADERS
from quire_gateway.tracing import Tracing
from quire_gateway.usage import Usage
from quire_http.asgi import Receive, Scope, Send
from quire_http.body_memory import BodyMemory
from quire_http.connection_age import closing, is_old, opened_at
from quire_http.credentials import key_of
from quire_http.dialects import RESPONSES_PREFIX
from quire_http.drain import RETRY_AFTER_SECONDS, Drain
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import CutError, HttpExchange

_MAX_VALUES = 1 << 18  # JSON values of a body
_MEMORY_PER_BYTE = 2  # of a body until its answer ends: itself, and the texts of its prompt
#: Each attempt has a context of its own, a child of the client's.
_WITHOUT_TRACE = REQUEST_HEADERS - TRACE_HEADERS
_INPUT_ITEMS, _CANCEL = "/input_items", "/cancel"  # after the id of a response
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
    limiter: Limiter
    cache: ResponseCache
    classifier: Classifier
    shadow: ShadowTraffic
    tracing: Tracing | None = None  # None: no spans are made, and a client's context goes on as it is
    batch: BatchProxy | None = None  # files, batches and jobs, where there is quire-batch
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
        elif path.startswith(RESPONSES_PREFIX) and (
            method in ("GET", "HEAD", "DELETE") or (method == "POST" and path.endswith(_CANCEL))
        ):
            await self._logged(exchange, self._kept(exchange))
        elif self.batch is not None and self.batch.serves(exchange.scope):
            await self._logged(exchange, self._forward(exchange, self.batch))
        elif method not in ("GET", "HEAD"):
            raise not_found(path)
        elif path in _MANAGEMENT:
            await self.management.get(exchange)
        else:
            await self.management.get_models(exchange, self._authenticate(exchange))

    async def _forward(self, exchange: HttpExchange, batch: BatchProxy) -> int:
        """A request about files, batches or jobs, by the key of its client."""
        client = self._client(exchange, digest := key_hash(_authorization(exchange)))
        name = client.full_name if client is not None else ""
        return await batch.forward(exchange, name, digest)

    async def _kept(self, exchange: HttpExchange) -> int:
        """A request about a response that a replica keeps, which the replica judges by its client."""
        client, path = self._authenticate(exchange), exchange.scope["path"]
        response_id = path.removeprefix(RESPONSES_PREFIX).removesuffix(_INPUT_ITEMS).removesuffix(_CANCEL)
        found = self.dispatcher.keeper(calls.keeper(response_id))
        if found is None:
            message = "This response is not kept (any more): the replica that made it is gone, or none did."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        model, replica = found
        method = "GET" if exchange.scope["method"] == "HEAD" else exchange.scope["method"]
        if query := exchange.scope["query_string"].decode("latin-1"):
            path = f"{path}?{query}"
        headers = {"x-request-id": exchange.request_id}
        identity = _identity(client, is_line=False)
        request = UpstreamRequest(path, headers, b"", False, identity=identity, method=method)
        return await self.relay.relay_kept(exchange, model, replica, self.dispatcher.timeouts, request)

    async def _logged(self, exchange: HttpExchange, work: Awaitable[int]) -> None:
        """Await a request that is no model's to answer, and write its line. ``work`` returns its status."""
        self.drain.num_requests += 1
        status, path = 0, exchange.scope["path"]
        try:
            status = await work
        except ApiError as error:
            status = error.status
            raise
        finally:
            self.drain.num_requests -= 1
            facts = {"request_id": exchange.request_id, "path": path, "client": exchange.client}
            self.access_log.request({**facts, "status": status})

    async def _relay(self, exchange: HttpExchange) -> None:
        path = exchange.scope["path"]
        span = None
        if self.tracing is not None:
            span = self.tracing.begin(path, exchange.request_id, exchange.scope["headers"])
        account = Account(path, exchange.request_id, self.metrics, self.access_log, self.clock, span)
        self.drain.num_requests += 1
        error: Exception | None = None
        try:
            await self._answer(exchange, account)
        except CutError as cut:
            error, exchange.num_events = cut, account.num_events
            message = "The gateway is going away before the answer is complete; ask again."
            raise overloaded("draining", message, RETRY_AFTER_SECONDS) from None
        except Exception as raised:
            error, exchange.num_events = raised, account.num_events
            raise
        finally:
            self.drain.num_requests -= 1
            account.end(error)

    async def _answer(self, exchange: HttpExchange, account: Account) -> None:
        client = self._authenticate(exchange)
        account.client = client.full_name if client is not None else ""
        body = await exchange.body(_MAX_VALUES)
        call = calls.read(exchange.scope["path"], body)
        exchange.shrink_body(_MEMORY_PER_BYTE * len(body))
        if request_class := await self.classifier.classify(self.dispatcher.route(call.model, client), call):
            call = replace(call, request_class=request_class)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.scope["headers"]}
        is_line = self._delegated(exchange) is not None
        destination = self._destination(call, given, client, is_line=is_line)
        account.model, account.stream, account.generates = destination.model, call.stream, call.generates
        account.deployment, account.arm = destination.replicas.name, destination.arm
        account.route = destination.route
        if account.span is not None:
            account.span.describe(
                destination.model,
                {"gen_ai.request.stream": call.stream, "gen_ai.request.max_tokens": call.max_tokens},
            )
        if destination.served_name != call.model:
            body = calls.with_model(body, call.model, destination.served_name)
        passed = REQUEST_HEADERS if account.span is None else _WITHOUT_TRACE
        headers = {name: value for name, value in given.items() if name in passed}
        headers |= {"x-request-id": exchange.request_id, USAGE_HEADER: "true"}
        account.prompt_tokens = estimated_tokens(call) if call.generates else 0
        if client is not None:
            # What a fallback would answer with may have a longer context.
            length = None if destination.fallbacks else destination.replicas.context_length
            account.reservation = await self.limiter.admit(
                client, account.prompt_tokens, longest_answers(call, length), destination.prices
            )
            exchange.headers += account.reservation.headers()
        identity = _identity(client, is_line=is_line)
        request = _upstream_request(exchange.scope["path"], headers, body, call, identity, is_line=is_line)
        uid = client.uid if client is not None else ""
        if await self._answer_again(exchange, destination, request, uid, account, is_exact=call.is_exact):
            return
        salt = f"{identity.cache_scope}\0{call.cache_salt}"  # no client hits what another one has cached
        cached = call.prompt if call.has_answer else ()
        facts = RequestFacts(call.model, cached, call.user, salt, exchange.scope["headers"])
        self.shadow.copy(destination.shadow, request, facts, destination.served_name)
        work = self.relay.relay(
            exchange,
            destination,
            request,
            facts,
            account,
            lambda: self._destination(call, given, self._authenticate(exchange), is_line=is_line),
        )
        await exchange.run(work, self.drain.cut)
        recording = account.recording
        if recording is not None and (answer := recording.answer) is not None:
            self.cache.put(recording.key, answer, destination.cache_seconds)

    def _destination(
        self, call: calls.Call, given: Mapping[str, str], client: LLMClient | None, *, is_line: bool
    ) -> Destination:
        """Where the request goes, as it is now. Raises ApiError where it is refused. The line of a batch can
        wait: no canned text for 50,000 of them, and no other model's answer.
        """
        destination = self.dispatcher.destination(call, given, client)
        if is_line or call.kept_by is not None:
            return destination._replace(fallbacks=())
        if not call.has_answer:  # a canned text is no vector
            others = tuple(step for step in destination.fallbacks if step.canned is None)
            return destination._replace(fallbacks=others)
        return destination

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
        """Whose request it is, before anything else of it is read: by its key, or a line's delegation."""
        delegated = self._delegated(exchange)
        return self._client(exchange, key_hash(_authorization(exchange)) if delegated is None else delegated)

    def _delegated(self, exchange: HttpExchange) -> str | None:
        """The digest of the key for which the line of a batch is; None of a request of its client."""
        if self.batch is None:
            return None
        return self.batch.delegations.key_hash(exchange.scope["headers"])

    def _client(self, exchange: HttpExchange, digest: str) -> LLMClient | None:
        if not self.management.is_ready():
            raise overloaded("starting", "The gateway is starting; ask again.", RETRY_AFTER_SECONDS)
        client = self.dispatcher.client_of(digest, is_missing=not digest and not _authorization(exchange))
        exchange.client = client.full_name if client is not None else ""
        return client


def _authorization(exchange: HttpExchange) -> bytes:
    """The key as an Authorization header has it, whichever header it came in."""
    headers = exchange.scope["headers"]
    if key := key_of(headers):
        return b"Bearer " + key
    if any(name == b"x-api-key" for name, _ in headers):
        return b""  # two keys that are not the same
    given = [value for name, value in headers if name == b"authorization"]
    return bytes(given[0]) if len(given) == 1 else b""


def _upstream_request(
    path: str,
    headers: dict[str, str],
    body: bytes | bytearray,
    call: calls.Call,
    identity: Identity,
    *,
    is_line: bool,
) -> UpstreamRequest:
    """What is sent to a replica, and what may become of it there."""
    is_resumable = call.stream and call.is_exact and path in calls.COMPLETION_PATHS
    if is_resumable:
        headers = {**headers, TOKENS_HEADER: "true"}
    # An answer in one piece has its first byte when all is computed; a line of a batch can wait.
    is_hedgeable = call.stream and not call.pins_cache and not is_line and call.kept_by is None
    return UpstreamRequest(
        path,
        headers,
        body,
        call.stream,
        call.model,
        identity,
        is_resumable,
        is_hedgeable=is_hedgeable,
        kept_by=call.kept_by,
    )


def _identity(client: LLMClient | None, *, is_line: bool) -> Identity:
    """What replicas take a client for: each has a cache of its own. Lines of batches come after requests."""
    name = "" if client is None else client.full_name
    return Identity(name, BATCH_PRIORITY if is_line else NORMAL_PRIORITY, name)
