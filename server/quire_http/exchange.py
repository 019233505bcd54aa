"""One request's HTTP exchange on bare ASGI: read a bounded body, send JSON or a stream, notice a disconnect.

Bare on purpose: request classes and middleware of frameworks wrap `receive`, which hides the client's
disconnect, and re-encode what is streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

from quire_http.asgi import Receive, Scope, Send
from quire_http.body_memory import BodyMemory, BodyShare
from quire_http.body_size import CONTAINER_WEIGHT, LEAST_MEMORY_PER_BYTE, BodySize
from quire_http.connection_age import lost
from quire_http.dialects import dialect_of
from quire_http.drain import Cut
from quire_http.errors import ApiError, from_exception

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
_BODY_TIMEOUT_SECONDS = 30.0
_DISCARD_SECONDS = 10.0  # as long as an unread body is waited for after the response
_RESERVED_BYTES = 64 * 1024  # of a body whose length is not announced, before its next bytes are read
_LONG_ANSWER = 64 * 1024  # bytes; longer ones are in memory until the client has read them
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ClientGoneError(Exception):
    """The client hung up; there is no response to send."""


class CutError(Exception):
    """The drain's time is over: the request ends with an error."""


class _Stop:
    """Cancels the present task, once, and says why."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._error: Exception | None = None

    def client_gone(self) -> None:
        """The client hung up."""
        self._cancel(ClientGoneError())

    def cut(self) -> None:
        """The drain's time is over."""
        self._cancel(CutError())

    @property
    def is_only_reason(self) -> bool:
        """Whether nothing else has cancelled the task."""
        return self._error is not None and self._task.cancelling() == 1

    def reraise(self) -> None:
        """Raise the reason in place of the cancellation. It is not kept: it refers to frames, and they to
        this.
        """
        error = self._error
        self.forget()
        try:
            if error is not None:
                raise error from None
        finally:
            del error

    def forget(self) -> None:
        """The task is not cancelled any more."""
        if self._error is not None:
            self._error = None
            self._task.uncancel()

    def _cancel(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()


class HttpExchange:
    """One request and its response. ``translate``: the response for an exception of a handler."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        memory: BodyMemory | None = None,
        translate: Callable[[Exception], ApiError] = from_exception,
    ) -> None:
        self.scope = scope
        self.client = ""  # the name of the API key, empty where there are none
        self._memory = memory or BodyMemory()
        self._translate = translate
        self._share: BodyShare | None = None
        self._receive = receive
        self._send = send
        self.started = False
        self._is_stream = False  # the response is a stream of events
        self._is_reading = False
        self._has_unread_body = True
        self._is_unfinished = False  # the response is sent, its end not yet, see `finish`
        self.request_id = request_id(scope["headers"])
        self.headers = [("x-request-id", self.request_id)]  # of the response, whatever it will be
        self.dialect = dialect_of(scope["path"])
        #: Name and data of the event for a failure, of a stream that has a form of its own for it.
        self.describe_failure: Callable[[ApiError], tuple[str, dict[str, Any]]] | None = None
        self.num_events = 0  # that were sent
        if self.dialect.request_id_header:
            self.headers.append((self.dialect.request_id_header, self.request_id))

    async def body(self, max_values: int) -> bytes | bytearray:
        """The request's body, with at most so many JSON values. Its memory is counted until `release_body`.

        Raises ApiError when it is too long, too slow, or has no room beside the bodies of other requests;
        ClientGoneError.
        """
        body, size = bytearray(), BodySize()
        self._share = self._memory.share(self.client)
        # What it takes at least: so those that begin to be read do not refuse one another in the middle.
        self._share.grow_to(LEAST_MEMORY_PER_BYTE * self._announced_bytes())
        self._is_reading = True
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
                while self._has_unread_body:
                    self._share.grow_to(size.memory + _RESERVED_BYTES)
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    self._has_unread_body = message.get("more_body", False)
                    data = message.get("body", b"")
                    if len(body) + len(data) > MAX_BODY_BYTES:
                        raise _too_long()
                    size.add(data)
                    if size.num_values > max_values:
                        raise _too_many_values(max_values)
                    self._share.grow_to(size.memory)
                    body += data
                return body
        except TimeoutError:
            self._has_unread_body = False  # it is not waited for a second time
            raise ApiError(408, f"The body did not arrive within {_BODY_TIMEOUT_SECONDS:g} s.") from None

    async def body_parts(self) -> AsyncIterator[bytes]:
        """The request's body while it comes, of any length: for one that is passed on and not kept.

        Raises ApiError where nothing comes for too long; ClientGoneError.
        """
        self._is_reading = True
        try:
            while self._has_unread_body:
                async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
                    message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                self._has_unread_body = message.get("more_body", False)
                yield message.get("body", b"")
        except TimeoutError:
            self._has_unread_body = False  # it is not waited for a second time
            raise ApiError(408, f"Nothing of the body came for {_BODY_TIMEOUT_SECONDS:g} s.") from None

    def grow_body(self, num_bytes: int) -> None:
        """At least so much of the body, and of what belongs to it, is in memory. Raises ApiError where there
        is no room for it.
        """
        if self._share is not None:
            self._share.grow_to(num_bytes)

    def shrink_body(self, num_bytes: int) -> None:
        """So much of the body is in memory, and nothing that was made of it."""
        if self._share is not None:
            self._share.shrink_to(num_bytes)

    def release_body(self) -> None:
        """Nothing of the body is in memory any more, but for what its size does not matter for."""
        if self._share is not None:
            self._share.release()

    def _announced_bytes(self) -> int:
        """The length of the body by its header, 0 where it has none. Raises ApiError where it is too long."""
        announced = [int(value) for name, value in self.scope["headers"] if name == b"content-length"]
        if announced and announced[0] > MAX_BODY_BYTES:
            raise _too_long()
        return announced[0] if announced else 0

    async def json(self, body: object, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A whole JSON response."""
        await self.whole(status, to_json(body), "application/json", headers)

    async def error(self, error: ApiError) -> None:
        """An error response, or an error event where a stream has begun."""
        if self.started and not self._is_stream:
            return  # a whole response was sent, or its part: then the connection is closed, which says enough
        if self.started:
            name, data = (
                self.dialect.error_event(error, self.request_id, self.num_events)
                if self.describe_failure is None
                else self.describe_failure(error)
            )
            await self.encoded_event(to_json(data), name=name)
            await self.end_stream()
        else:
            await self.json(self.dialect.error(error, self.request_id), error.status, error.headers)

    async def serve(self, work: Awaitable[None]) -> None:
        """Run the handler to the end of the response: an exception of it becomes the answer."""
        try:
            await work
        except Exception as error:  # the boundary of a request
            await self.fail(error)
        try:
            await self.finish()
        finally:
            self.release_body()

    async def fail(self, error: Exception) -> None:
        """The response to an exception of a handler; none where the client is gone."""
        if isinstance(error, ClientGoneError):
            return
        answer = self._translate(error)
        if answer is not error and answer.status >= 500 and answer.status != 503:
            logger.error("request failed", extra={"path": self.scope["path"]}, exc_info=error)
        await self.error(answer)

    async def whole(
        self, status: int, payload: bytes, content_type: str, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """A response whose length is known."""
        await self._start(
            status, [("content-type", content_type), ("content-length", str(len(payload))), *headers]
        )
        self._is_unfinished = self._has_unread_body or len(payload) > _LONG_ANSWER
        await self._send({"type": "http.response.body", "body": payload, "more_body": self._is_unfinished})

    async def begin(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], *, is_events: bool = False
    ) -> None:
        """Begin a response that is passed on from elsewhere, by `part` and `end`. ``is_events``: it is a
        stream of events, and an error may become one of them.
        """
        self.started, self._is_stream = True, is_events
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})

    async def part(self, data: bytes) -> None:
        """The next bytes of what `begin` has begun."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Its last bytes."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def finish(self) -> None:
        """End a response that was sent before the request's body was read, once that has come, too; and a
        long one, once the client has read it.

        The server may close the connection at the end of a response, and to close one with bytes unread is a
        reset, which can discard the response before the client reads it. Called last, when the request counts
        no more: a client may be slow.
        """
        if self._is_unfinished:
            if self._has_unread_body:
                await self._discard_body()
            await self._send({"type": "http.response.body", "body": b""})

    async def encoded_event(self, data: bytes, comment: bytes = b"", *, name: str = "") -> None:
        """One server-sent event, of data that is JSON already; the first one begins the stream.
        ``comment``: a line of it that clients skip.
        """
        if not self.started:
            self._is_stream = True
            await self._start(
                200,
                [
                    ("content-type", "text/event-stream; charset=utf-8"),
                    ("cache-control", "no-cache"),
                    ("x-accel-buffering", "no"),
                ],
            )
        self.num_events += 1
        payload = b"data: " + data + b"\n\n"
        if name:
            payload = b"event: " + name.encode() + b"\n" + payload
        if comment:
            payload = b": " + comment + b"\n" + payload
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})

    async def comment(self, text: bytes) -> None:
        """A line of a stream that has begun which clients skip; without line ends."""
        await self.part(b": " + text + b"\n\n")

    async def end_stream(self) -> None:
        """What the API ends its streams with."""
        await self.end(self.dialect.end_of_stream)

    async def run(self, work: Coroutine[Any, Any, None], cut: Cut) -> None:
        """Run `work`, but stop it when the client hangs up (ClientGoneError) or `cut` is set (CutError)."""
        stop = _Stop()
        reasons = ((lost(self.scope), stop.client_gone), (cut, stop.cut))
        for signal, callback in reasons:
            signal.callbacks.add(callback)
        try:
            for signal, callback in reasons:
                if signal.is_set():
                    callback()
            await work
        except asyncio.CancelledError:
            if stop.is_only_reason:
                stop.reraise()
            raise
        finally:
            for signal, callback in reasons:
                signal.callbacks.discard(callback)
            stop.forget()  # `work` may have ended in the same moment

    async def _discard_body(self) -> None:
        """Read what is left of the body. A client that waits for "100 Continue" sends none."""
        if not self._is_reading and any(name == b"expect" for name, _ in self.scope["headers"]):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while (await self._receive()).get("more_body", False):
                    pass

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        encoded = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in (*self.headers, *headers)
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _too_long() -> ApiError:
    return ApiError(413, f"The body is longer than {MAX_BODY_BYTES} bytes.")


def _too_many_values(limit: int) -> ApiError:
    return ApiError(
        400,
        f"The body has more than {limit} JSON values, where an object or a list counts {CONTAINER_WEIGHT}: "
        "send less in one request.",
    )


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's own, where it sent one that can be logged and sent back; else a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]):
        return str(given[0].decode("ascii"))
    return os.urandom(16).hex()


def to_json(body: object) -> bytes:
    """Compact JSON. Raises ValueError of a number that is none or infinite, for which JSON has no form."""
    return _ENCODER.encode(body).encode()
