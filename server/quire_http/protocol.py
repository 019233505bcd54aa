"""uvicorn's HTTP protocol with the limits that a public server needs.

It bounds the bytes of headers and of a body's framing, the number of headers, of requests that wait in a
connection and of connections, and the time for headers, for the rest of a body that was answered before it
came, and for a client that does not read. It parses so much at a time that the event loop is not held up. It
records the age and idleness of each connection for the drain. A connection has a maximum age, so that clients
that keep theirs open find new replicas.

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
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from quire_http.connection_limit import ConnectionLimit, State
from quire_http.drain import LINGER_SECONDS, Cut
from quire_http.errors import ApiError, overloaded
from quire_http.exchange import request_id, to_json
from quire_http.head_writer import HeadWriter
from quire_http.parser_turns import ParserTurns

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_PIPELINED = 16  # requests that wait in one connection for the answers to those before them
# Bytes that are parsed at once: less than a millisecond, where each few of them are a chunk of their own.
_STEP_BYTES = 1024
_FIRST_STEP_BYTES = 4096  # of what has just come, where it begins with a head: most requests are shorter
_BODY_STEP_BYTES = 64 * 1024  # of a body without chunks
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
_TOO_MANY_HEADERS = ApiError(431, f"There are more than {MAX_HEADERS} headers.")
_TOO_MANY_PIPELINED = ApiError(
    400, f"More than {MAX_PIPELINED} requests wait in this connection: send them over several."
)
_NO_ROOM = overloaded("too_many_connections", "Every connection that this server can have is in use.", 1)
_INVALID = ApiError(400, "This is not a valid HTTP/1.1 request.")
_CODING = ApiError(400, "transfer-encoding: must be chunked, in HTTP/1.1", param="transfer-encoding")
_HOST = ApiError(400, "host: must be sent once, as HTTP/1.1 has it.", param="host")
_TUNNEL = ApiError(405, "CONNECT: this server is no proxy.", headers=(("allow", "GET, HEAD, POST"),))


class _RefusedError(Exception):
    """Ends the parser's work; its message is the refusal."""


class _Flow(FlowControl):
    """Flow control that does not resume reading while what was read is not parsed."""

    is_behind = False

    def resume_reading(self) -> None:
        """The application wants more."""
        if self.read_paused and self.is_behind:
            self.read_paused = False
        else:
            super().resume_reading()

    def fall_behind(self) -> None:
        """More was read than is parsed now."""
        self.is_behind = True
        if not self.read_paused:
            self._transport.pause_reading()

    def catch_up(self) -> None:
        """All that was read is parsed."""
        self.is_behind = False
        if not self.read_paused:
            self._transport.resume_reading()


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
        limit: ConnectionLimit,
        turns: ParserTurns,
    ) -> None:
        self.opened_at = time.monotonic()
        self.expires_at = self.opened_at + max_age * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
        self.idle_since: float | None = self.opened_at
        self._limit = limit
        self._turns = turns
        self._unparsed = memoryview(b"")
        self._body_left = 0  # bytes of a body whose length was announced
        self._reading_headers = True
        self._header_bytes = 0
        self._framing_left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._age_timer: asyncio.TimerHandle | None = None
        self._has_upgrade = False  # the head that was parsed last offers another protocol
        self._refusal: bytes | None = None  # from then on nothing is parsed
        self._lost = Cut()
        state = {"opened_at": self.opened_at, "expires_at": self.expires_at, "lost": self._lost}
        super().__init__(config, server_state, {**app_state, **state}, _loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """The first request's headers have to come soon."""
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._writer: Any = HeadWriter(transport, self.loop)  # has what uvicorn uses of a transport
        if not self._limit.admit(self):
            self._refuse(_NO_ROOM)
            transport.close()
            return
        self._start_timer()
        self._age_timer = self.loop.call_later(self.expires_at - self.opened_at, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection, and no request that is being answered."""
        self._limit.remove(self)
        self._unparsed = memoryview(b"")
        self._stop_timer()
        self._stop_unread_timer()
        if self._age_timer is not None:
            self._age_timer.cancel()
        super().connection_lost(exc)
        self._lost.set()

    def pause_writing(self) -> None:
        """The client has to read before more is sent."""
        super().pause_writing()
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_unread_timer()
        super().resume_writing()

    def make_room(self) -> None:
        """Close the connection, which waits for its client, for the sake of a new one."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse a head that begins now at once, and the rest in turn with other connections."""
        self._unset_keepalive_if_required()
        self._unparsed = memoryview(bytes(self._unparsed) + data)
        if self._flow.is_behind:
            return
        if self._reading_headers:
            self._parse_step(_FIRST_STEP_BYTES)
        if self._unparsed:
            self._flow.fall_behind()
            self._turns.add(self, self.loop)

    def parse_some(self) -> bool:
        """Parse a step; whether bytes are left."""
        self._parse_step(max(_STEP_BYTES, min(self._body_left, _BODY_STEP_BYTES)))
        if not self._unparsed and not self.transport.is_closing():
            if self._body_left > 0 and self.cycle.response_started:  # it is dropped, see `on_body`
                self._turns.add_dropping(self, self.loop)
            else:
                self._flow.catch_up()
        return bool(self._unparsed)

    def read_more(self) -> None:
        """All that was read is parsed, and it is the connection's turn."""
        if not self.transport.is_closing():
            self._flow.catch_up()

    def _parse_step(self, size: int) -> None:
        step, self._unparsed = self._unparsed[:size], self._unparsed[size:]
        self._parse_bounded(step)
        if not self._unparsed or self._refusal is not None or self.transport.is_closing():
            self._unparsed = memoryview(b"")  # an empty part of what was read would keep all of it

    def _parse_bounded(self, data: memoryview) -> None:
        """Parse, with a bound on the bytes of headers: the parser itself would take any amount."""
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
            data = data[len(part) - self._parse(part) :]
            # Chunk extensions and trailers end in the parser and not in the body that the application bounds.
            if not self._reading_headers and self._framing_left < 0 and not self.transport.is_closing():
                self.transport.close()

    def _parse(self, data: memoryview | bytes) -> int:
        """Feed the parser; returns how many bytes it left because it took them for another protocol's."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse(self._without_upgrade())
            return len(data) - int(upgrade.args[0])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.args[0] if isinstance(cause, _RefusedError) else _INVALID)
        return 0

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
        """A request begins. Raises _RefusedError."""
        self.idle_since = None
        if not self._is_answering:
            self._limit.move(self, State.REQUEST)
        super().on_message_begin()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedError(_TOO_MANY_PIPELINED)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. Trailers are dropped: whether the application saw them would depend on when they come.
        Raises _RefusedError.
        """
        if self._reading_headers:
            if len(self.headers) >= MAX_HEADERS:
                raise _RefusedError(_TOO_MANY_HEADERS)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are here. Raises _RefusedError before the application hears of the request."""
        if self.parser.get_method() == b"CONNECT":
            raise _RefusedError(_TUNNEL)
        self._has_upgrade = self.parser.should_upgrade()
        if self._has_upgrade:
            return  # they are parsed again without it
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            raise _RefusedError(_HOST)  # RFC 9112, 3.2: a proxy could take another one of them
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() != "1.1"):
            raise _RefusedError(_CODING)
        super().on_headers_complete()  # fails where the target is no URL: before the head counts as read
        self._reading_headers = False
        self._header_bytes = 0
        self._framing_left = MAX_HEADER_BYTES
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        self._body_left = lengths[0] if lengths else 0
        self._stop_timer()
        self.cycle.transport = self._writer

    def on_body(self, body: bytes) -> None:
        """The parser has delivered a part of the body."""
        self._body_left -= len(body)
        self._framing_left += _WIRE_BYTES_PER_BODY_BYTE * len(body)
        if not self.cycle.response_started:  # else no task reads it any more
            super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next are another request's headers, even while this one is being answered."""
        if self._has_upgrade:
            return
        self._reading_headers = True
        self._stop_timer()
        super().on_message_complete()
        self._end_where_the_parser_ends()
        self._limit.move(self, State.ANSWER if self._is_answering else State.IDLE)
        if not self._is_answering:  # the answer came first, and uvicorn's timer ended with the next data
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _end_where_the_parser_ends(self) -> None:
        """A trailer can say that the request is the last one, too: what follows is then never parsed, so the
        connection must not stay open.
        """
        if not self.parser.should_keep_alive():
            self.cycle.keep_alive = False
            if self.cycle.response_complete and not self.transport.is_closing():
                self.transport.close()

    def on_response_complete(self) -> None:
        """The connection is idle again, unless another request is waiting in it."""
        self._writer.flush()  # before anything else is sent, or the connection is closed
        is_last = not self.pipeline  # else the next request begins to be answered
        if is_last:
            self.idle_since = time.monotonic()
            self._limit.move(self, State.IDLE if self._reading_headers else State.REQUEST)
        super().on_response_complete()
        if self._refusal is not None and is_last:
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
