"""A few threads for work of many clients, who take turns: a client with much work delays the others by one
piece of it, and has one thread at a time.

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

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, deque[_Work]] = defaultdict(deque)
        self._turns: deque[str] = deque()  # clients with waiting work, but for those whose work runs
        self._running: set[str] = set()

    def num_waiting(self, client: str) -> int:
        """Pieces of work of a client that have not begun."""
        with self._lock:
            return len(self._waiting.get(client, ()))

    def submit(self, client: str, call: Callable[[], T]) -> "Future[T]":
        """As `ThreadPoolExecutor.submit`. What is cancelled before it begins costs nothing."""
        work = _Work(call, Future())
        with self._lock:
            self._waiting[client].append(work)
            if client not in self._running and len(self._waiting[client]) == 1:
                self._turns.append(client)
        # By its future alone: work that referred to itself would wait for the collector, with what it holds.
        work.future.add_done_callback(
            lambda future: self._drop(client, future) if future.cancelled() else None
        )
        self._threads.submit(self._run_next)
        return work.future

    def _drop(self, client: str, future: "Future[Any]") -> None:
        with self._lock:
            queue = self._waiting.get(client, deque())
            work = next((one for one in queue if one.future is future), None)
            if work is None:
                return
            queue.remove(work)
            if not queue:
                del self._waiting[client]
                if client in self._turns:
                    self._turns.remove(client)

    def _run_next(self) -> None:
        """Run pieces of work until none is left. There is a call of this for each that was submitted."""
        while (taken := self._take()) is not None:
            client, work = taken
            try:
                if work.future.set_running_or_notify_cancel():
                    _run(work)
            finally:
                with self._lock:
                    self._running.remove(client)
                    if self._waiting[client]:
                        self._turns.append(client)  # behind every client that came meanwhile
                    else:
                        del self._waiting[client]
                del taken, work  # an exception of it refers to this frame, too

    def _take(self) -> tuple[str, _Work] | None:
        with self._lock:
            if not self._turns:
                return None
            client = self._turns.popleft()
            self._running.add(client)
            return client, self._waiting[client].popleft()


def _run(work: _Work) -> None:
    try:
        result = work.call()
    except BaseException as error:  # as ThreadPoolExecutor does; a panic of a Rust library is one
        work.future.set_exception(error)
        del work  # the exception refers to this frame
    else:
        work.future.set_result(result)
