"""What a request's scope says of its connection: when it was opened, whether the answer has to close it, and
when its client is gone.

`protocol.Connection` puts that there. A connection that is not of our server (a test's) is as old as its
request, and is not lost.
"""

from __future__ import annotations

import math
import time

from quire_http.asgi import Message, Scope, Send
from quire_http.drain import Cut


def opened_at(scope: Scope) -> float:
    """When the connection was opened, by the monotonic clock."""
    return float(scope.get("state", {}).get("opened_at", time.monotonic()))


def is_old(scope: Scope) -> bool:
    """Whether the connection has reached its maximum age."""
    return bool(time.monotonic() >= scope.get("state", {}).get("expires_at", math.inf))


def lost(scope: Scope) -> Cut:
    """Set when the connection is."""
    return scope.get("state", {}).get("lost") or Cut()


def closing(send: Send) -> Send:
    """The response closes its connection: while draining each one, else that of an old connection."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending
