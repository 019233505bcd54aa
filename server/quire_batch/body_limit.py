"""Refuses a body that is too long, or has too many JSON values, while it comes: before it is parsed, and
after its sender is known.

An ASGI middleware, because FastAPI reads a whole JSON body before any dependency of a route. Uploads of files
have limits of their own, in `upload`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_batch import context
from quire_batch.lines import MAX_LINE_BYTES
from quire_http.body_size import BodySize
from quire_http.errors import ApiError

_FILES = "/v1/files"
_JOBS = "/v1/jobs"
_MOST_BYTES = 1 << 20  # of a batch's metadata, and of what else has a body
_MOST_VALUES = 1 << 18  # JSON values, as in the gateway


class BodyLimit:
    """In front of the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body, if there is one."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == _FILES:
            await self._app(scope, receive, send)
            return
        try:
            context.of(Request(scope)).tokens.caller(scope["headers"])
            body = await _body(scope, receive)
        except ApiError as error:
            headers = {**dict(error.headers), "connection": "close"}  # its body may still be coming
            await JSONResponse(error.body, error.status, headers)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)


async def _body(scope: Scope, receive: Receive) -> bytes:
    """Raises ApiError."""
    most = MAX_LINE_BYTES if scope["path"] == _JOBS else _MOST_BYTES
    body, size, is_more = bytearray(), BodySize(), True
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_long(most)
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The body ended early.")
        is_more, data = message.get("more_body", False), message.get("body", b"")
        if len(body) + len(data) > most:
            raise _too_long(most)
        size.add(data)
        if size.num_values > _MOST_VALUES:
            raise ApiError(413, f"The body has more than {_MOST_VALUES} JSON values.", code="body_too_long")
        body += data
    return bytes(body)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"The body is longer than {most} bytes.", code="body_too_long")
