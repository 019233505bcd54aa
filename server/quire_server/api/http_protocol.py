"""uvicorn's HTTP protocol with the limits that a public server needs.

It bounds the bytes of headers and of a body's framing, and the time for headers, for the rest of a body that
was answered before it came, and for a client that does not read. It records the age and idleness of each
connection for the drain. A connection has a maximum age, so that clients that keep theirs open find new
replicas.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from quire_server.api.drain import LINGER_SECONDS
from quire_server.api.http_exchange import to_json
from quire_server.api.protocol.errors import ApiError

MAX_HEADER_BYTES = 64 * 1024
_TIMEOUT_SECONDS = 30.0
_UNREAD_SECONDS = 60.0  # a client that reads nothing for so long must not keep its share of the queue
# Bytes on the wire that a byte of body may cost: a chunk of one byte takes six ("1\r\nx\r\n").
_WIRE_BYTES_PER_BODY_BYTE = 8
_AGE_JITTER = 0.1  # share of the maximum age: connections that were opened together must not end together
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_TOO_LARGE = f"The headers are longer than {MAX_HEADER_BYTES} bytes."


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
        """Count bytes of headers before they are parsed: the parser itself would take any amount."""
        if self._reading_headers:
            if self._timer is None and not self._is_answering:
                self._start_timer()
            self._header_bytes += len(data)
            # What arrives together with the end of the headers is body; only a flood without one counts.
            if self._header_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data[:MAX_HEADER_BYTES]:
                self._refuse(431, "Request Header Fields Too Large", _TOO_LARGE)
                return
            data = _without_upgrade(data)
        else:
            self._framing_left -= len(data)
        super().data_received(data)
        # Chunk extensions and trailers end in the parser and not in the body that the application bounds.
        if not self._reading_headers and self._framing_left < 0 and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """As JSON, not as uvicorn's text: clients parse the errors of this server."""
        self._refuse(400, "Bad Request", msg)

    def on_message_begin(self) -> None:
        """A request begins."""
        self.idle_since = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are here."""
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
        if not self._reading_headers and self._timer is None:
            self._start_timer()  # for the rest of the body, which is not read

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        """Respond to bytes that never become a request."""
        body = to_json(ApiError(status, message).body)
        head = f"HTTP/1.1 {status} {phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

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


def _without_upgrade(data: bytes) -> bytes:
    """Java's own client offers HTTP/2 with its first request. A server may ignore that, but the parser, for
    which another protocol begins after the headers, would drop the body.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nignored-upgrade:", head) + end + rest
