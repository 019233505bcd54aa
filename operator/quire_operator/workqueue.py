"""A queue of keys in which a key is processed once at a time, however often it was added.

It has the three properties of client-go's work queue: adding a waiting key changes nothing; a key in progress
is never given to a second worker; one that is added meanwhile is processed again afterwards. As with
controller-runtime's priority queue, changed keys come before those of a re-list, of which one at a time is in
progress, so that changes never wait for more than one of them. Of the keys of a group one at a time is in
progress too: the others wait here, where they block no worker. Knows nothing of Kubernetes.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

BACKOFF_FIRST = 1.0
BACKOFF_LAST = 300.0


class Timer(Protocol):
    """The cancellable result of `call_later`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the queue needs; tests inject a fake clock."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., None], *args: object) -> Timer: ...


class WorkQueue(Generic[K]):
    """Keys in the order in which they were added, background keys last, each with its own back-off. `group`:
    the group of a key, None for one that is in none.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
        group: Callable[[K], Hashable] = lambda key: None,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._group = group
        self._groups: dict[K, Hashable] = {}  # of the keys in progress, as it was when each was given out
        self._waiting: OrderedDict[K, float] = OrderedDict()  # key -> since when
        self._background: OrderedDict[K, float] = OrderedDict()
        self._background_in_progress: tuple[K, ...] = ()  # the background key in progress: one at most
        self._working: dict[K, float] = {}
        self._again: dict[K, float] = {}  # added while in progress
        self._later: dict[K, tuple[float, Timer]] = {}  # key -> due, timer
        self._failures: dict[K, int] = {}
        self._added = asyncio.Event()

    def add(self, key: K, *, background: bool = False) -> None:
        """Process `key` as soon as a worker is free, unless it waits already; `background`: when nothing else
        waits.
        """
        now = self._clock.time()
        if key in self._working:
            self._again.setdefault(key, now)
        elif key not in self._waiting:
            since = self._background.pop(key, now)
            (self._background if background else self._waiting)[key] = since
            self._added.set()

    def add_after(self, key: K, delay: float) -> None:
        """Add `key` in `delay` seconds; of several calls the earliest wins."""
        due = self._clock.time() + delay
        known = self._later.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        self._later[key] = (due, self._clock.call_later(delay, self._fire, key))

    def retry(self, key: K, *, most: float = BACKOFF_LAST) -> float:
        """Add `key` again after its back-off, which doubles with each failure in a row; returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        full = min(most, BACKOFF_FIRST * 2.0 ** min(failures, 20))
        delay = full * (0.5 + 0.5 * self._jitter())
        self.add_after(key, delay)
        return delay

    def forget(self, key: K) -> None:
        """`key` succeeded: its next failure starts with the shortest back-off."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The oldest waiting key of whose group none is in progress; `done` must be called with it."""
        while (key := self._next()) is None:
            self._added.clear()
            await self._added.wait()
        if key in self._background:
            self._background_in_progress = (key,)
        waiting = self._background if key in self._background else self._waiting
        self._working[key] = waiting.pop(key)
        if (group := self._group(key)) is not None:
            self._groups[key] = group
        return key

    def _next(self) -> K | None:
        """The key that may be processed next."""
        busy = set(self._groups.values())
        for keys in (self._waiting, {} if self._background_in_progress else self._background):
            for key in keys:
                if self._group(key) not in busy:
                    return key
        return None

    def done(self, key: K) -> None:
        """The worker has finished `key`; if it was added meanwhile, it waits again."""
        del self._working[key]
        self._groups.pop(key, None)
        since = self._again.pop(key, None)
        if since is not None:
            self._waiting[key] = since
        if key in self._background_in_progress:
            self._background_in_progress = ()
        if self.depth:
            self._added.set()

    @property
    def depth(self) -> int:
        """How many keys wait."""
        return len(self._waiting) + len(self._background)

    @property
    def oldest_age(self) -> float:
        """Seconds that the longest waiting key has waited; 0 when none does."""
        oldest = min((*self._waiting.values(), *self._background.values()), default=None)
        return 0.0 if oldest is None else self._clock.time() - oldest

    def _fire(self, key: K) -> None:
        del self._later[key]
        self.add(key)
