"""Who may come in: a bounded house, with a place reserved before any work is done for a request.

Called by `completions` for each request. Sheds in three ways, each a 503 with its reason: `queue_full`,
`load_shed` (with a rising probability over the last fifth of the queue) and `memory_pressure`. Readiness
never depends on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from quire_server.api.errors import overloaded
from quire_server.engine.messages import EngineInfo, EngineStats

SHED_FROM = 0.8
MEMORY_LIMIT = 0.95
_MAX_RETRY_AFTER = 30


@dataclass(frozen=True)
class Load:
    """What the house looks like when a request knocks."""

    in_house: int  # answers admitted and not finished
    max_running: int
    waiting: int  # as the engine says: it may lack memory for more than it runs
    max_queued: int

    @property
    def depth(self) -> int:
        """Answers that wait."""
        return max(self.in_house - self.max_running, self.waiting, 0)


def shed_reason(load: Load, newcomers: int, dice: float) -> str | None:
    """Why `newcomers` more answers may not come in, or None. `dice` is uniform in [0, 1)."""
    full = load.waiting > 0 and load.waiting >= load.max_queued
    if full or load.in_house + newcomers - load.max_running > load.max_queued:
        return "queue_full"
    if load.depth and dice < (load.depth / load.max_queued - SHED_FROM) / (1 - SHED_FROM):
        return "load_shed"
    return None


class Place:
    """One request's share of the house."""

    def __init__(self, house: Admission, num_answers: int) -> None:
        self._house = house
        self._num_answers = num_answers
        self._tokens = 0

    def hold(self, prompt_tokens: int) -> None:
        """Account for the KV cache of the prompts; raises ApiError under memory pressure."""
        self._house.refuse_under_memory_pressure(prompt_tokens)
        self.grow(prompt_tokens)

    def grow(self, num_tokens: int) -> None:
        """Tokens were added to the KV cache."""
        self._tokens += num_tokens
        self._house.tokens += num_tokens

    def leave(self) -> None:
        """Give everything back."""
        self._house.in_house -= self._num_answers
        self._house.tokens -= self._tokens
        self._house.on_change(self._house.in_house)


class Admission:
    """The house: what is in it, and what the engine can hold."""

    def __init__(self, max_queued: int, on_change: Callable[[int], None]) -> None:
        self._max_queued = max_queued
        self.on_change = on_change
        self.in_house = 0
        self.tokens = 0
        self._info: EngineInfo | None = None

    def reserve(self, num_answers: int, info: EngineInfo, stats: EngineStats) -> Place:
        """A place for a request of so many answers; raises ApiError. The caller has to `leave` it."""
        self._info = info
        load = self.load(info, stats)
        reason = shed_reason(load, num_answers, random.random())
        if reason is not None:
            message = f"{load.depth} requests are waiting, of at most {self._max_queued}"
            raise overloaded(reason, message, _retry_after(load))
        self.in_house += num_answers
        self.on_change(self.in_house)
        return Place(self, num_answers)

    def load(self, info: EngineInfo, stats: EngineStats) -> Load:
        """The house now."""
        return Load(self.in_house, info.max_num_seqs, stats.waiting, self._max_queued)

    def refuse_under_memory_pressure(self, prompt_tokens: int) -> None:
        """A request that is alone may fill the cache; one that has company must leave room."""
        assert self._info is not None
        limit = int(self._info.kv_capacity * MEMORY_LIMIT)
        if self.tokens and self.tokens + prompt_tokens > limit:
            message = f"the KV cache has room for {limit} tokens and {self.tokens} are in use"
            raise overloaded("memory_pressure", message, 1)


def _retry_after(load: Load) -> int:
    """Seconds: one for each time that the running ones have to make room for the waiting ones."""
    return min(_MAX_RETRY_AFTER, 1 + load.depth // load.max_running)
