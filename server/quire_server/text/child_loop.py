"""The inside of a child process (see ``child``): answers questions until its input ends.

Called by the main functions of ``chat_worker`` and ``grammar_worker``. The kernel ends the process when an
answer takes too long (an alarm with its default action: fatal) or too much memory.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 2.0
MEMORY = 512 << 20

Answering = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], Answering], setup_seconds: float = SECONDS) -> None:
    """The first line goes to ``prepare``, every other one to what that returned."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    answering: Answering | None = None
    answer: dict[str, Any]
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, setup_seconds if answering is None else SECONDS)
        question = json.loads(line)
        try:
            if answering is None:
                answering = prepare(question)
                answer = {"ok": True}
            else:
                answer = answering(question)
        except MemoryError:
            answer = {"error": "it takes too much memory."}
        except Exception as error:  # whatever a question does wrong is an answer; the next may be right
            answer = {"error": f"{str(error)[:500] or type(error).__name__}"}
        encoded = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()
