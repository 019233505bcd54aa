"""Ports on which a program of the tests may listen a moment later.

For API servers, operators and model servers that tests start.
"""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Different ports, outside the range that the kernel lends to clients (32768 and up): such a port can be
    one end of a connection by the time that a server binds it.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            if port not in found:
                found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
