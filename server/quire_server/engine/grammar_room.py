"""Where a request with a grammar waits until its matcher is built. Called by `loop`, from its thread.

Building takes from half a millisecond to a second; it happens on a thread of its own, without the GIL, while
the loop goes on with its steps. What the API process has not compiled itself within its limits does not get
here, so that one thread is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from quire_server.core.request import Grammar, Request
from quire_server.runner.grammars import Grammars, Matcher

LOOK_SECONDS = 0.002


class GrammarRoom:
    """Requests in the order in which they came."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[str, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request, grammar: Grammar) -> None:
        """Begin to build."""
        self._waiting[request.request_id] = (request, self._thread.submit(self._grammars.build, grammar))

    def leave(self, request_id: str) -> None:
        """The request has ended, here or later."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1].cancel()
        self._grammars.forget(request_id)

    def ready(self) -> Iterator[tuple[Request, str]]:
        """Requests whose matcher is there, or the reason why it never will be. They leave."""
        for request_id, (request, building) in list(self._waiting.items()):
            if not building.done():
                continue
            del self._waiting[request_id]
            if (error := building.exception()) is not None:
                yield request, str(error)
            else:
                self._grammars.admit(request_id, building.result())
                yield request, ""
