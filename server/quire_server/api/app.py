"""The ASGI application: which path is whose, who may come in, and what a drain changes.

Built by `create_app` around a House. One table of routes; whatever is not in it is a 404, and with keys
everything that is not public is denied before it is even looked up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server import log
from quire_server.api import completions, public
from quire_server.api.auth import PUBLIC_PATHS, require_key
from quire_server.api.drain import RETRY_AFTER_SECONDS
from quire_server.api.errors import ApiError, from_exception, overloaded
from quire_server.api.health_route import health
from quire_server.api.house import House
from quire_server.api.reply import ClientGoneError, Reply

logger = logging.getLogger(__name__)

Handler = Callable[[House, Reply], Awaitable[None]]

ROUTES: dict[str, tuple[str, Handler]] = {
    "/v1/chat/completions": ("POST", completions.chat),
    "/v1/completions": ("POST", completions.complete),
    "/v1/models": ("GET", public.models),
    "/tokenize": ("POST", public.tokenize),
    "/detokenize": ("POST", public.detokenize),
    "/reset_prefix_cache": ("POST", public.reset_prefix_cache),
    "/health": ("GET", health),
    "/metrics": ("GET", public.exposition),
    "/version": ("GET", public.version),
    "/openapi.json": ("GET", public.openapi_document),
}
_MODEL_PREFIX = "/v1/models/"


def create_app(house: House) -> ASGIApp:
    """The application of one API process."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        reply = Reply(scope, receive, _closing(send) if house.drain.begun else send)
        log.request_facts.set({"request_id": reply.request_id})  # of this task alone
        try:
            await _dispatch(house, reply)
        except ClientGoneError:
            pass
        except Exception as error:  # the boundary of a request
            answer = from_exception(error)
            if answer.status >= 500 and answer.status != 503:
                logger.exception("request failed", extra={"path": scope["path"]})
            await reply.error(answer)

    return app


async def _dispatch(house: House, reply: Reply) -> None:
    scope = reply.scope
    path = scope["path"]
    if path not in PUBLIC_PATHS:
        # A connection that is not of our server (a test's) is as old as this request.
        if house.drain.refuses(scope.get("state", {}).get("opened_at", time.monotonic())):
            raise overloaded(
                "draining", "The server is going away; ask again elsewhere.", RETRY_AFTER_SECONDS
            )
        require_key(house.keys, scope)
    method, handler = _route(path)
    allowed = ("GET", "HEAD") if method == "GET" else (method,)
    if scope["method"] not in allowed:
        raise ApiError(405, f"{path} is for {method}.", headers=(("allow", ", ".join(allowed)),))
    await handler(house, reply)


def _route(path: str) -> tuple[str, Handler]:
    if path.startswith(_MODEL_PREFIX):
        return ROUTES["/v1/models"]
    if path not in ROUTES:
        raise ApiError(404, f"There is no {path}.", code="not_found")
    return ROUTES[path]


def _closing(send: Send) -> Send:
    """While draining, every response tells its client not to come back on this connection."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending
