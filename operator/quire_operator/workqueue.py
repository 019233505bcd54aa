"""A queue of keys in which a key is worked on once at a time, however often it was added.

The three properties of client-go's work queue: adding a waiting key changes nothing; a key that is being
worked on is never given to a second worker; one added meanwhile comes again afterwards. And one of
controller-runtime's: what changed goes before what is only looked at again, of which one key is worked on at
a time, so that the requests for what changed wait for no more than that. Filled by the event handlers, the
re-list and the poller, drained by the reconcile workers. Knows nothing of Kubernetes.
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
    """What `call_later` gives: something to cancel."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that the queue needs; tests bring one that they can turn by hand."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., None], *args: object) -> Timer: ...


class WorkQueue(Generic[K]):
    """Keys in the order in which they were first added, those in the background last, each with a back-off of
    its own.
    """

    def __init__(self, clock: Clock, *, jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._waiting: OrderedDict[K, float] = OrderedDict()  # key -> since when
        self._background: OrderedDict[K, float] = OrderedDict()
        self._looking_again: tuple[K, ...] = ()  # what is worked on in the background: one at most
        self._working: dict[K, float] = {}
        self._again: dict[K, float] = {}  # added while being worked on
        self._later: dict[K, tuple[float, Timer]] = {}  # key -> due, timer
        self._failures: dict[K, int] = {}
        self._added = asyncio.Event()

    def add(self, key: K, *, background: bool = False) -> None:
        """Work on `key` as soon as a worker is free, if it does not wait already; in the background: when
        nothing else waits.
        """
        now = self._clock.time()
        if key in self._working:
            self._again.setdefault(key, now)
        elif key not in self._waiting:
            since = self._background.pop(key, now)
            (self._background if background else self._waiting)[key] = since
            self._added.set()

    def add_after(self, key: K, delay: float) -> None:
        """Add `key` in `delay` seconds; of several calls the earliest counts."""
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
        """Work on `key` succeeded: its next failure starts from the shortest back-off."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """The oldest waiting key; `done` must be called with it."""
        while not self._waiting and (self._looking_again or not self._background):
            self._added.clear()
            await self._added.wait()
        if self._waiting:
            key, since = self._waiting.popitem(last=False)
        else:
            key, since = self._background.popitem(last=False)
            self._looking_again = (key,)
        self._working[key] = since
        return key

    def done(self, key: K) -> None:
        """The worker let go of `key`; if it was added meanwhile, it waits again."""
        del self._working[key]
        since = self._again.pop(key, None)
        if since is not None:
            self._waiting[key] = since
        if key in self._looking_again:
            self._looking_again = ()
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
