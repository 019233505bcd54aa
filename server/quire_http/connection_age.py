"""What a request's scope says of its connection: when it was opened, and whether the answer has to close it.

`protocol.Connection` puts the times there. A connection that is not of our server (a test's) is as old as its
request.
"""

from __future__ import annotations

import math
import time

from quire_http.asgi import Message, Scope, Send


def opened_at(scope: Scope) -> float:
    """When the connection was opened, by the monotonic clock."""
    return float(scope.get("state", {}).get("opened_at", time.monotonic()))


def is_old(scope: Scope) -> bool:
    """Whether the connection has reached its maximum age."""
    return bool(time.monotonic() >= scope.get("state", {}).get("expires_at", math.inf))


def closing(send: Send) -> Send:
    """The response closes its connection: while draining each one, else that of an old connection."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sending
