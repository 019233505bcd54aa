"""Who may come in: a bounded house, with a place reserved before any work is done for a request.

Called by `completions` for each request. Sheds in three ways, each a 503 with its reason: `queue_full` (by
requests or by prompt tokens), `load_shed` (with a rising probability, low priorities first) and
`memory_pressure`. A client beyond its own limit gets a 429. Readiness never depends on any of it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire_server.api.errors import limited, overloaded
from quire_server.api.service_rate import ServiceRate
from quire_server.engine.messages import EngineInfo, EngineStats

SHED_FROM = 0.8
#: All low priorities are shed before the first normal one; high ones are only ever refused by a full queue.
SHED_LOW_FROM = 0.6
_SHED_WIDTH = 0.2
MEMORY_LIMIT = 0.95
_MAX_RETRY_AFTER = 60


@dataclass(frozen=True)
class Limits:
    """What the house may hold. None is no limit."""

    max_queued: int
    max_queued_tokens: int | None = None
    max_per_client: int | None = None


@dataclass(frozen=True)
class Newcomer:
    """A request at the door. `prompt_tokens` is an estimate: nothing has been done for it yet."""

    client: str = ""
    num_answers: int = 1
    prompt_tokens: int = 0
    priority: int = 0  # lower is more urgent


@dataclass(frozen=True)
class Load:
    """What the house looks like when a request knocks."""

    in_house: int  # answers admitted and not finished
    max_running: int
    waiting: int  # as the engine says: it may lack memory for more than it runs
    max_queued: int
    queued_tokens: int = 0  # of prompts whose answers have not begun
    max_queued_tokens: int | None = None

    @property
    def depth(self) -> int:
        """Answers that wait."""
        return max(self.in_house - self.max_running, self.waiting, 0)

    @property
    def fullness(self) -> float:
        """Share of the queue that is taken, by requests or by tokens; 0 while nobody waits."""
        if not self.depth:
            return 0.0
        by_tokens = self.queued_tokens / self.max_queued_tokens if self.max_queued_tokens else 0.0
        return max(self.depth / self.max_queued if self.max_queued else 1.0, by_tokens)


def shed_reason(load: Load, newcomer: Newcomer, dice: float) -> str | None:
    """Why a newcomer may not come in, or None. `dice` is uniform in [0, 1)."""
    full = load.waiting > 0 and load.waiting >= load.max_queued
    if full or load.in_house + newcomer.num_answers - load.max_running > load.max_queued:
        return "queue_full"
    if too_many_tokens(load, newcomer.prompt_tokens):
        return "queue_full"
    shed_from = SHED_LOW_FROM if newcomer.priority > 0 else SHED_FROM
    if newcomer.priority >= 0 and dice < (load.fullness - shed_from) / _SHED_WIDTH:
        return "load_shed"
    return None


def too_many_tokens(load: Load, prompt_tokens: int) -> bool:
    """Whether a prompt goes over the limit of tokens; one that finds nobody waiting may be of any length."""
    limit = load.max_queued_tokens
    return limit is not None and load.queued_tokens > 0 and load.queued_tokens + prompt_tokens > limit


class Place:
    """One request's share of the house."""

    def __init__(self, house: Admission, newcomer: Newcomer) -> None:
        self._house = house
        self.newcomer = newcomer
        self._unbegun = {0: newcomer.prompt_tokens}  # prompt tokens by answer, as far as they are known
        self._tokens = newcomer.prompt_tokens
        self._num_begun = 0

    def hold(self, prompt_tokens: Sequence[int]) -> None:
        """Now the prompts are known, one for each answer; raises ApiError when there is no room for them."""
        self._house.release_tokens(self._tokens, sum(self._unbegun.values()))
        self._tokens, self._unbegun = 0, {}
        self._house.check_tokens(sum(prompt_tokens))
        self._tokens, self._unbegun = sum(prompt_tokens), dict(enumerate(prompt_tokens))
        self._house.take_tokens(self._tokens)

    def begin(self, answer: int) -> None:
        """The first token of an answer came: its prompt waits no longer."""
        self._num_begun += 1
        self._house.release_tokens(0, self._unbegun.pop(answer))

    def grow(self, num_tokens: int) -> None:
        """Tokens were added to the KV cache."""
        self._tokens += num_tokens
        self._house.tokens += num_tokens

    def retry_after(self) -> int:
        """As of Admission."""
        return self._house.retry_after()

    def leave(self) -> None:
        """Give everything back."""
        self._house.release_tokens(self._tokens, sum(self._unbegun.values()))
        self._house.part(self.newcomer, self._num_begun)


class Admission:
    """The house: what is in it, and what the engine can hold."""

    def __init__(
        self, limits: Limits, clock: Callable[[], float], on_change: Callable[[int, int], None]
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_change = on_change  # (answers in the house, prompt tokens that wait)
        self._rate = ServiceRate()
        self._per_client = Counter[str]()
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self.in_house = 0
        self.tokens = 0
        self.queued_tokens = 0

    def reserve(self, newcomer: Newcomer, info: EngineInfo, stats: EngineStats) -> Place:
        """A place for a request; raises ApiError. The caller has to `leave` it."""
        self._info, self._stats = info, stats
        self._check_client(newcomer)
        load = self.load(info, stats)
        reason = shed_reason(load, newcomer, random.random())
        if reason is not None:
            message = f"{load.depth} requests are waiting, of at most {self._limits.max_queued}"
            if load.queued_tokens and load.max_queued_tokens:
                message += f", with {load.queued_tokens} prompt tokens, of at most {load.max_queued_tokens}"
            raise overloaded(reason, message, self.retry_after())
        self._check_memory(newcomer.prompt_tokens)
        self.in_house += newcomer.num_answers
        self._per_client[newcomer.client] += newcomer.num_answers
        self._changed(0)
        self.take_tokens(newcomer.prompt_tokens)
        return Place(self, newcomer)

    def load(self, info: EngineInfo, stats: EngineStats) -> Load:
        """The house now."""
        return Load(
            self.in_house,
            info.max_num_seqs,
            stats.waiting,
            self._limits.max_queued,
            self.queued_tokens,
            self._limits.max_queued_tokens,
        )

    def retry_after(self) -> int:
        """Seconds in which what waits now will have been served, at the rate at which answers leave."""
        assert self._info is not None
        load = self.load(self._info, self._stats)
        measured = self._rate.seconds_for(max(load.depth, 1))
        # Nothing measured yet: a second for each time that the running ones have to make room.
        seconds = 1 + load.depth // load.max_running if measured is None else math.ceil(measured)
        return min(max(seconds, 1), _MAX_RETRY_AFTER)

    def check_tokens(self, prompt_tokens: int) -> None:
        """Raises ApiError when prompts of so many tokens have no room."""
        assert self._info is not None
        if too_many_tokens(self.load(self._info, self._stats), prompt_tokens):
            limit = self._limits.max_queued_tokens
            message = f"{self.queued_tokens} prompt tokens are waiting, of at most {limit}"
            raise overloaded("queue_full", message, self.retry_after())
        self._check_memory(prompt_tokens)

    def take_tokens(self, num_tokens: int) -> None:
        """Prompts came in."""
        self.tokens += num_tokens
        self.queued_tokens += num_tokens
        self._on_change(self.in_house, self.queued_tokens)

    def release_tokens(self, num_tokens: int, num_queued: int) -> None:
        """Prompts left, or wait no longer."""
        self.tokens -= num_tokens
        self.queued_tokens -= num_queued
        self._on_change(self.in_house, self.queued_tokens)

    def part(self, newcomer: Newcomer, num_served: int) -> None:
        """A request left; so many of its answers were served."""
        self.in_house -= newcomer.num_answers
        self._per_client[newcomer.client] -= newcomer.num_answers
        if not self._per_client[newcomer.client]:
            del self._per_client[newcomer.client]
        self._changed(num_served)

    def _changed(self, num_served: int) -> None:
        assert self._info is not None
        is_waiting = self.in_house > 0 and self.load(self._info, self._stats).depth > 0
        self._rate.observe(self._clock(), num_served, is_waiting=is_waiting)
        self._on_change(self.in_house, self.queued_tokens)

    def _check_client(self, newcomer: Newcomer) -> None:
        limit, present = self._limits.max_per_client, self._per_client[newcomer.client]
        if limit is not None and present + newcomer.num_answers > limit:
            message = f"{present} requests with this key are running or waiting, of at most {limit}"
            raise limited(message, self.retry_after())

    def _check_memory(self, prompt_tokens: int) -> None:
        """A request that is alone may fill the cache; one that has company must leave room."""
        assert self._info is not None
        limit = int(self._info.kv_capacity * MEMORY_LIMIT)
        if self.tokens and self.tokens + prompt_tokens > limit:
            message = f"the KV cache has room for {limit} tokens and {self.tokens} are in use"
            raise overloaded("memory_pressure", message, self.retry_after())
