"""The main loop of a child process (see ``child_process``): answers requests until its input ends.

The kernel kills the process when a response takes too long (by a signal with its default action) or too much
memory.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_server.text import rust_panics

SECONDS = 2.0
MEMORY = 512 << 20


@dataclass(frozen=True)
class Limits:
    """What the setup, and each response after it, may take."""

    seconds: float = SECONDS
    memory: int = MEMORY  # of the process; beyond what it has after its setup, where that has a limit
    setup_seconds: float = SECONDS
    setup_memory: int | None = None
    timer: int = signal.ITIMER_REAL  # ITIMER_PROF: seconds of CPU, however busy the machine is


Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], Handler], limits: Limits | None = None) -> None:
    """Pass the first line to ``prepare``, and every other line to the function that it returned."""
    limits = limits or Limits()
    _limit_memory(limits.setup_memory or limits.memory)
    for name in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    handler: Handler | None = None
    response: dict[str, Any]
    for line in sys.stdin.buffer:
        signal.setitimer(limits.timer, limits.setup_seconds if handler is None else limits.seconds)
        request = json.loads(line)
        try:
            with rust_panics.as_errors():
                if handler is None:
                    handler = prepare(request)
                    if limits.setup_memory is not None:
                        _limit_memory(_size() + limits.memory)
                    response = {"ok": True}
                else:
                    response = handler(request)
        except MemoryError:
            response = {"error": "it takes too much memory."}
        except Exception as error:  # an error is a response, too; the next request may succeed
            response = {"error": f"{str(error)[:500] or type(error).__name__}"}
        encoded = json.dumps(response).encode()
        signal.setitimer(limits.timer, 0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()


def _limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _size() -> int:
    """The size of this process, as RLIMIT_AS counts it."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
