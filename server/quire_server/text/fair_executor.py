"""One thread for work of many clients, who take turns: a client with much work delays the others by one piece
of it.

Used where the time of a piece is the client's choice, as for grammars.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Work:
    call: Callable[[], Any]
    future: "Future[Any]"


class FairExecutor:
    """Thread-safe. Work of one client runs in the order in which it was submitted."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, deque[_Work]] = defaultdict(deque)
        self._turns: deque[str] = deque()  # clients with waiting work, but for the one whose work runs
        self._running: str | None = None

    def num_waiting(self, client: str) -> int:
        """Pieces of work of a client that have not begun."""
        with self._lock:
            return len(self._waiting.get(client, ()))

    def submit(self, client: str, call: Callable[[], T]) -> "Future[T]":
        """As `ThreadPoolExecutor.submit`. What is cancelled before it begins costs nothing."""
        work = _Work(call, Future())
        with self._lock:
            self._waiting[client].append(work)
            if client != self._running and len(self._waiting[client]) == 1:
                self._turns.append(client)
        work.future.add_done_callback(lambda future: self._drop(client, work) if future.cancelled() else None)
        self._thread.submit(self._run_next)
        return work.future

    def _drop(self, client: str, work: _Work) -> None:
        with self._lock:
            queue = self._waiting.get(client)
            if queue is None or work not in queue:
                return
            queue.remove(work)
            if not queue:
                del self._waiting[client]
                if client in self._turns:
                    self._turns.remove(client)

    def _run_next(self) -> None:
        """Run one piece of work, if any is left: there is a call of this for each that was submitted."""
        with self._lock:
            if not self._turns:
                return
            client = self._turns.popleft()
            work = self._waiting[client].popleft()
            self._running = client
        try:
            if work.future.set_running_or_notify_cancel():
                _run(work)
        finally:
            with self._lock:
                self._running = None
                if self._waiting[client]:
                    self._turns.append(client)  # behind every client that came meanwhile
                else:
                    del self._waiting[client]


def _run(work: _Work) -> None:
    try:
        result = work.call()
    except BaseException as error:  # as ThreadPoolExecutor does; a panic of a Rust library is one
        work.future.set_exception(error)
    else:
        work.future.set_result(result)
