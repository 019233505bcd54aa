"""What a route returns to FastAPI: the handler that writes the response on the request's exchange itself.

FastAPI finds the route and no more: its own responses would hide the client's disconnect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from quire_http.exchange import HttpExchange
from quire_server.api.context import ServerContext

#: The key of the scope under which the exchange travels to its route.
EXCHANGE = "quire.exchange"


class ExchangeResponse(Response):
    """What a route returns to FastAPI: the handler that writes the response on the exchange itself."""

    background = None

    def __init__(self, handler: Callable[[ServerContext, HttpExchange], Awaitable[None]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler; FastAPI never sees an exception of it."""
        exchange: HttpExchange = scope[EXCHANGE]
        await exchange.serve(self._handler(scope["app"].state.context, exchange))
