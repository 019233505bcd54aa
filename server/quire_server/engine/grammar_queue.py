"""Requests with a grammar wait here until its matcher is compiled, before they are scheduled.

Compiling takes from half a millisecond to a second. It runs on a thread of its own, without the GIL, while
the engine continues with its steps. The API process has compiled every grammar before, within limits of time
and memory, so one thread is enough; clients take turns on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future

from quire_server.core.request import Request
from quire_server.core.sampling_params import Grammar
from quire_server.runner.structured_outputs import GrammarMatcher, Grammars
from quire_server.text.fair_executor import FairExecutor

POLL_SECONDS = 0.002


class GrammarQueue:
    """Requests in the order of their arrival. Used by the engine's thread only."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = FairExecutor("grammars")
        self._waiting: dict[str, tuple[Request, Future[GrammarMatcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def requests(self) -> list[Request]:
        """Those that wait."""
        return [request for request, _ in self._waiting.values()]

    def add(self, request: Request, grammar: Grammar) -> None:
        """Start compiling the grammar of a request."""
        building = self._thread.submit(request.client, functools.partial(self._grammars.build, grammar))
        self._waiting[request.request_id] = (request, building)

    def remove(self, request_id: str) -> None:
        """The request has finished or was aborted, in the queue or after it."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1].cancel()
        self._grammars.forget(request_id)

    def pop_ready(self) -> Iterator[tuple[Request, str]]:
        """Remove and return requests whose compilation ended, each with its error (empty: it succeeded)."""
        for request_id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            if (error := future.exception()) is not None:
                yield request, str(error)
            else:
                self._grammars.admit(request_id, future.result())
                yield request, ""
