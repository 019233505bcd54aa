"""Ports on which a program of the tests may listen a moment later.

Called by whatever starts an API server, an operator or a model server. Must know none of them.
"""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Different ports, outside the range that the kernel lends to clients (32768 and up): such a port can be
    the end of somebody's connection by the time that a server binds it.
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
