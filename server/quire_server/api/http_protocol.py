"""uvicorn's HTTP protocol with the limits that a public server needs.

It bounds the bytes of headers and of a body's framing, and the time for headers, for the rest of a body that
was answered before it came, and for a client that does not read. It records the age and idleness of each
connection for the drain. A connection has a maximum age, so that clients that keep theirs open find new
replicas.

What a head means is decided once the parser has all of it, so that the answers do not depend on how the bytes
were split into segments: else a proxy and this server could disagree on where a request ends.
"""

from __future__ import annotations

import asyncio
import random
import time
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from quire_server.api.drain import LINGER_SECONDS
from quire_server.api.http_exchange import request_id, to_json
from quire_server.api.protocol.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024
_TIMEOUT_SECONDS = 30.0
_UNREAD_SECONDS = 60.0  # a client that reads nothing for so long must not keep its share of the queue
# Bytes on the wire that a byte of body may cost: a chunk of one byte takes six ("1\r\nx\r\n").
_WIRE_BYTES_PER_BODY_BYTE = 8
_AGE_JITTER = 0.1  # share of the maximum age: connections that were opened together must not end together
# As long as what a refused client still sends is read and dropped: to close a connection with bytes unread is
# a reset, which can discard the refusal before the client reads it.
_REFUSED_SECONDS = 5.0
#: Headers of an offer to speak another protocol, which is not taken.
_UPGRADE_HEADERS = frozenset((b"connection", b"upgrade", b"http2-settings"))
_TOO_LARGE = ApiError(431, f"The headers are longer than {MAX_HEADER_BYTES} bytes.")
_INVALID = ApiError(400, "This is not a valid HTTP/1.1 request.")
_CODING = ApiError(400, "transfer-encoding: must be chunked, in HTTP/1.1", param="transfer-encoding")
_TUNNEL = ApiError(405, "CONNECT: this server is no proxy.", headers=(("allow", "GET, HEAD, POST"),))


class _RefusedError(Exception):
    """Ends the parser's work; its message is the refusal."""


class Connection(HttpToolsProtocol):
    """One client connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_age: float,
    ) -> None:
        self.opened_at = time.monotonic()
        self.expires_at = self.opened_at + max_age * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
        self.idle_since: float | None = self.opened_at
        self._reading_headers = True
        self._header_bytes = 0
        self._framing_left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._has_upgrade = False  # the head that was parsed last offers another protocol
        self._refusal: bytes | None = None  # from then on nothing is parsed
        times = {"opened_at": self.opened_at, "expires_at": self.expires_at}
        super().__init__(config, server_state, {**app_state, **times}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """The first request's headers have to come soon."""
        super().connection_made(transport)
        self._start_timer()
        self._age_timer = self.loop.call_later(self.expires_at - self.opened_at, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self._stop_timer()
        self._stop_unread_timer()
        if self._age_timer is not None:
            self._age_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has to read before more is sent."""
        super().pause_writing()
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_unread_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse, with a bound on the bytes of headers: the parser itself would take any amount."""
        self._unset_keepalive_if_required()
        while data and self._refusal is None and not self.transport.is_closing():
            part = data
            if self._reading_headers:
                if self._timer is None and not self._is_answering:
                    self._start_timer()
                part = data[: MAX_HEADER_BYTES - self._header_bytes]
                self._header_bytes += len(part)
                if not part:
                    self._refuse(_TOO_LARGE)
                    return
            else:
                self._framing_left -= len(part)
            data = self._parse(part) + data[len(part) :]
            # Chunk extensions and trailers end in the parser and not in the body that the application bounds.
            if not self._reading_headers and self._framing_left < 0 and not self.transport.is_closing():
                self.transport.close()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; returns what it left because it took it for another protocol's."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse(self._without_upgrade())
            return data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.args[0] if isinstance(cause, _RefusedError) else _INVALID)
        return b""

    def _without_upgrade(self) -> bytes:
        """The head again without its offer of another protocol, for a new parser: the old one skips the body.

        Java's client offers HTTP/2 with its first request. A server may ignore that, but what follows this
        request could be meant for either protocol, so the answer closes the connection.
        """
        head = b"%s %s HTTP/%s\r\n" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        kept = [name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS]
        self._has_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return head + b"\r\n".join([*kept, b"connection: close", b"", b""])

    def on_message_begin(self) -> None:
        """A request begins."""
        self.idle_since = None
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are dropped: whether the application saw them would depend on when they come."""
        if self._reading_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are here. Raises _RefusedError before the application hears of the request."""
        if self.parser.get_method() == b"CONNECT":
            raise _RefusedError(_TUNNEL)
        self._has_upgrade = self.parser.should_upgrade()
        if self._has_upgrade:
            return  # they are parsed again without it
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() != "1.1"):
            raise _RefusedError(_CODING)
        self._reading_headers = False
        self._header_bytes = 0
        self._framing_left = MAX_HEADER_BYTES
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The parser has delivered a part of the body."""
        self._framing_left += _WIRE_BYTES_PER_BODY_BYTE * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next are another request's headers, even while this one is being answered."""
        if self._has_upgrade:
            return
        self._reading_headers = True
        self._stop_timer()
        super().on_message_complete()
        if not self._is_answering:  # the answer came first, and uvicorn's timer ended with the next data
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The connection is idle again, unless another request is waiting in it."""
        if not self.pipeline:
            self.idle_since = time.monotonic()
        super().on_response_complete()
        if self._refusal is not None and not self.pipeline:
            self._send_refusal()
        elif not self._reading_headers and self._timer is None:
            self._start_timer()  # for the rest of the body, which is not read

    def _refuse(self, error: ApiError) -> None:
        """Respond to bytes that never become a request, after the responses to the requests before them. As
        JSON, not as uvicorn's text: clients parse the errors of this server.
        """
        body = to_json(error.body)
        name = request_id(self.headers or () if self._reading_headers else self.scope["headers"])
        headers = (*error.headers, ("content-type", "application/json"), ("content-length", str(len(body))))
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
        head += [f"{key}: {value}" for key, value in (("x-request-id", name), *headers)]
        self._refusal = "\r\n".join([*head, "", ""]).encode() + body
        if not self._reading_headers:  # the body of a request is invalid
            self._drop_request()
        if not self._is_answering:
            self._send_refusal()

    def _drop_request(self) -> None:
        """The application sees a disconnect of the request whose body was being read."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # it has not begun
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()

    def _send_refusal(self) -> None:
        if self._refusal is None or self.transport.is_closing():
            return
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.transport.write(self._refusal)
        self.transport.write_eof()
        self._timer = self.loop.call_later(_REFUSED_SECONDS, self._late)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(_TIMEOUT_SECONDS, self._late)

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _expire(self) -> None:
        """Close the connection, which is old, once its client has not used it for so long that it will not.
        If it is used, its next answer closes it.
        """
        idle = 0.0 if self.idle_since is None else time.monotonic() - self.idle_since
        if idle < LINGER_SECONDS:
            self._age_timer = self.loop.call_later(LINGER_SECONDS - idle, self._expire)
        elif not self.transport.is_closing():
            self.transport.close()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
