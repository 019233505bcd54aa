"""The ASGI application: FastAPI's routes inside a shell that authenticates and drains.

The shell is pure ASGI and decides on the scope alone, before anything is parsed: with keys, whatever is not
public is denied before its route is looked up, and a drain refuses new connections. It hands over `receive`
and `send` as they are, so that a disconnect is seen and streamed bytes are sent as they were encoded.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_http.connection_age import closing, is_old, opened_at
from quire_http.drain import RETRY_AFTER_SECONDS
from quire_http.errors import overloaded
from quire_http.exchange import HttpExchange
from quire_server import log
from quire_server.api import openapi, pooling_routes, routes
from quire_server.api.auth import PRINCIPAL, PUBLIC_PATHS
from quire_server.api.context import ServerContext
from quire_server.api.exchange_response import EXCHANGE
from quire_server.api.gateway_tokens import require_access
from quire_server.api.protocol.errors import from_exception
from quire_server.api.protocol.validation import Json


class _Application(FastAPI):
    """FastAPI with the document of this server."""

    def openapi(self) -> Json:
        """The document, of this server's models as far as they are known."""
        context: ServerContext = self.state.context
        vocab_size = context.engine.info.vocab_size if context.engine.connected else None
        return openapi.document(
            context.model_names, vocab_size, context.tokenizer.vocab_size, context.defaults, context.task
        )


def create_app(context: ServerContext) -> ASGIApp:
    """The application of one API process."""
    inner = _Application(
        routes=pooling_routes.of_task(
            context.task
        ),  # as they are: `include_router` would match each path twice
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: routes.refuse},
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    inner.state.context = context

    async def shell(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        is_last = context.drain.begun or is_old(scope)
        sending = closing(send) if is_last else send
        exchange = HttpExchange(scope, receive, sending, context.body_memory, from_exception)
        log.request_facts.set({"request_id": exchange.request_id})  # of this task alone
        try:
            _check_access(context, scope)
        except Exception as error:  # the boundary of a request that reaches no route
            await exchange.fail(error)
            await exchange.finish()
            return
        if PRINCIPAL in scope:
            exchange.client = scope[PRINCIPAL].client
        # The server leaves out the body of a HEAD by itself.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await inner({**scope, "method": method, EXCHANGE: exchange}, receive, send)

    return shell


def _check_access(context: ServerContext, scope: Scope) -> None:
    """Raises ApiError where the connection is drained, or neither a key nor a gateway's token is there."""
    if scope["path"] in PUBLIC_PATHS:
        return
    if context.drain.refuses(opened_at(scope)):
        raise overloaded("draining", "The server is going away; ask again elsewhere.", RETRY_AFTER_SECONDS)
    require_access(context.keys, context.gateway_keys, scope)
