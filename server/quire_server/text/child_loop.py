"""The main loop of a child process (see ``child_process``): answers requests until its input ends.

The kernel kills the process when a response takes too long (SIGALRM with its default action) or too much
memory.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from quire_server.text import rust_panics

SECONDS = 2.0
MEMORY = 512 << 20

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], Handler], setup_seconds: float = SECONDS) -> None:
    """Pass the first line to ``prepare``, and every other line to the function that it returned."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    handler: Handler | None = None
    response: dict[str, Any]
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, setup_seconds if handler is None else SECONDS)
        request = json.loads(line)
        try:
            with rust_panics.as_errors():
                if handler is None:
                    handler = prepare(request)
                    response = {"ok": True}
                else:
                    response = handler(request)
        except MemoryError:
            response = {"error": "it takes too much memory."}
        except Exception as error:  # an error is a response, too; the next request may succeed
            response = {"error": f"{str(error)[:500] or type(error).__name__}"}
        encoded = json.dumps(response).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()
