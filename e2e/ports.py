"""Ports on which a program of the tests may listen a moment later.

For API servers, operators and model servers that tests start. Several processes run tests side by side, so
each takes ports of a range of its own: a merely free one could be given twice before a server binds it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

# Outside the range that the kernel lends to clients (32768 and up): such a port can be one end of a
# connection by the time that a server binds it. Below the node ports (30000 and up) of our cluster.
_FIRST, _PORTS, _RANGES = 12_000, 200, 90


def free_ports(count: int) -> list[int]:
    """Different ports that this process has not given for as long as possible."""
    found: list[int] = []
    while len(found) < count:
        port = next(_ports(os.getpid()))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


@functools.cache
def _ports(_pid: int) -> Iterator[int]:
    """The ports of a range that is this process's alone, again and again. A forked process has its own."""
    for number in random.sample(range(_RANGES), _RANGES):
        # The kernel lets one process have the name, until that process ends, however it ends.
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0quire-test-ports-{number}")
        except OSError:
            claim.close()
            continue
        atexit.register(claim.close)
        first = _FIRST + number * _PORTS
        return itertools.cycle(range(first, first + _PORTS))
    raise RuntimeError(f"all {_RANGES} ranges of ports are in use: end test processes that were left behind")
