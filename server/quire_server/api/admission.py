"""Who may come in: a bounded house, with a place reserved before any work is done for a request.

Called by `completions` for each request. Sheds in three ways, each a 503 with its reason: `queue_full` (by
requests or by prompt tokens), `load_shed` (with a rising probability, low priorities first) and
`memory_pressure` (what runs holds the KV cache, as the engine says; what waits holds none of it). A client
beyond its own limit gets a 429. Readiness never depends on any of it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire_server.api.errors import limited, overloaded
from quire_server.api.service_rate import ServiceRate
from quire_server.core.engine_stats import EngineStats
from quire_server.engine.messages import EngineInfo

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


def is_short_of_memory(info: EngineInfo, stats: EngineStats, newcomer: Newcomer, prompt_tokens: int) -> bool:
    """Whether a newcomer's prompts would take the KV cache beyond MEMORY_LIMIT, beside what others hold now.

    Blocks that several answers share count once, and requests that wait hold none. Where nothing runs, a
    request may fill the cache; an urgent one can take the blocks of others, so it is let in to wait for them.
    """
    used = stats.kv_utilization * info.kv_capacity
    return (
        stats.running > 0
        and newcomer.priority >= 0
        and used + prompt_tokens > MEMORY_LIMIT * info.kv_capacity
    )


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
        self._num_begun = 0

    def hold(self, prompt_tokens: Sequence[int]) -> None:
        """Now the prompts are known, one for each answer; raises ApiError when there is no room for them."""
        self._house.queue_tokens(-sum(self._unbegun.values()))
        self._unbegun = {}
        self._house.check_tokens(self.newcomer, sum(prompt_tokens))
        self._unbegun = dict(enumerate(prompt_tokens))
        self._house.queue_tokens(sum(prompt_tokens))

    def begin(self, answer: int) -> None:
        """The first token of an answer came: its prompt waits no longer."""
        if (prompt_tokens := self._unbegun.pop(answer, None)) is not None:  # a second try begins again
            self._num_begun += 1
            self._house.queue_tokens(-prompt_tokens)

    def retry_after(self) -> int:
        """As of Admission."""
        return self._house.retry_after()

    def leave(self) -> None:
        """Give everything back."""
        self._house.queue_tokens(-sum(self._unbegun.values()))
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
        if (
            newcomer.prompt_tokens < info.kv_capacity
        ):  # or it is for the tokenizer to say whether it ever fits
            self._check_memory(newcomer, newcomer.prompt_tokens)
        self.in_house += newcomer.num_answers
        self._per_client[newcomer.client] += newcomer.num_answers
        self._changed(0)
        self.queue_tokens(newcomer.prompt_tokens)
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
        # Nothing measured yet: a second for each time that the running ones have to make room.
        guess = 1 + load.depth // load.max_running
        seconds = self._rate.seconds_for(self._clock(), max(load.depth, 1), guess)
        return math.ceil(min(max(seconds, 1), _MAX_RETRY_AFTER))

    def check_tokens(self, newcomer: Newcomer, prompt_tokens: int) -> None:
        """Raises ApiError when a newcomer's prompts, of so many tokens, have no room."""
        assert self._info is not None
        if too_many_tokens(self.load(self._info, self._stats), prompt_tokens):
            limit = self._limits.max_queued_tokens
            message = f"{self.queued_tokens} prompt tokens are waiting, of at most {limit}"
            raise overloaded("queue_full", message, self.retry_after())
        self._check_memory(newcomer, prompt_tokens)

    def queue_tokens(self, num_tokens: int) -> None:
        """So many prompt tokens wait from now on; fewer than none: wait no longer."""
        self.queued_tokens += num_tokens
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

    def _check_memory(self, newcomer: Newcomer, prompt_tokens: int) -> None:
        info = self._info
        assert info is not None
        if is_short_of_memory(info, self._stats, newcomer, prompt_tokens):
            used = self._stats.kv_utilization
            message = (
                f"{used:.0%} of the KV cache is in use by running requests, and a prompt of {prompt_tokens} "
                f"tokens would take it beyond {MEMORY_LIMIT:.0%} of {info.kv_capacity} tokens"
            )
            raise overloaded("memory_pressure", message, self.retry_after())
