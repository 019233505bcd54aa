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
from quire_gateway.log import AccessLog
from quire_gateway.management import Management
from quire_gateway.metrics import Metrics
from quire_gateway.openai import calls
from quire_gateway.relay import REQUEST_HEADERS, Relay
from quire_gateway.replicas import ReplicaTable
from quire_gateway.routing.router import RequestFacts
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

    table: ReplicaTable
    relay: Relay
    management: Management
    metrics: Metrics
    access_log: AccessLog
    drain: Drain
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
        elif method not in ("GET", "HEAD") or not await self.management.get(exchange):
            raise ApiError(404, f"There is no {path}.", code="not_found")

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
        body = await exchange.body(_MAX_VALUES)
        call = calls.read(exchange.scope["path"], body)
        model = self.table.served(call.model)
        account.model, account.stream = model.name, call.stream
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in exchange.scope["headers"]
            if name in REQUEST_HEADERS
        }
        headers["x-request-id"] = exchange.request_id
        request = UpstreamRequest(exchange.scope["path"], headers, body, call.stream, call.model)
        facts = RequestFacts(call.model, call.prompt, call.user, call.cache_salt, exchange.scope["headers"])
        await exchange.run(self.relay.relay(exchange, model, request, facts, account), self.drain.cut)
