"""Sends the head of a response together with the first bytes of its body, where these follow at once.

An ASGI server gets both one after the other, and would send each by a system call and in a packet of its own.
"""

from __future__ import annotations

import asyncio

_HEAD = b"HTTP/1.1 "


class HeadWriter:
    """The transport of a response. A head waits for its body until the next turn of the event loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send bytes of a response."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, once all is sent."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self._transport.is_closing()

    def flush(self) -> None:
        """A response has no body, or its body is not waited for any longer."""
        if self._head:
            data, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(data)
