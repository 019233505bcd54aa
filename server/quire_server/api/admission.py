"""Admission control: bounds what runs and waits, and sheds the rest before any work is done for it.

A request passes twice. Before its body is read, `Admission.reserve` refuses what is refused whatever the body
says: a full queue, a client at its own limit. Once the body is parsed, `Reservation.claim` takes the share of
the queue that it asks for; until then a reservation holds none, so that bodies that arrive slowly delay no
other request. Sheds in three ways, each a 503 with its reason: `queue_full` (by requests or prompt tokens),
`load_shed` (with a rising probability, low priorities first) and `memory_pressure` (the KV cache would be
short when the request and those that run beside it have grown to what they are expected to need). A client
beyond its own limit gets a 429. Readiness never depends on any of it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire_http.errors import limited, overloaded
from quire_server.core.policy import OutputLengthEstimator
from quire_server.core.stats import EngineStats
from quire_server.engine.messages import EngineInfo

SHED_FROM = 0.8
#: All low priorities are shed before the first normal one; high ones are only ever refused by a full queue.
SHED_LOW_FROM = 0.6
_SHED_WIDTH = 0.2
MEMORY_LIMIT = 0.95
_MAX_RETRY_AFTER = 60
_RATE_SECONDS = 30.0  # the age at which a measured rate weighs a third


class ServiceRate:
    """How many answers finish in a second while others wait: a ratio of two decaying sums.

    Time in which no request waits does not count: an idle server answers few requests and would seem slow.
    Time in which one waits counts, answers or not, so that a server that is stuck seems slow. Pure: the
    caller passes the clock.
    """

    def __init__(self) -> None:
        self._answers = 0.0
        self._seconds = 0.0
        self._waiting_since: float | None = None
        self._has_measured = False  # by now the answers may have decayed to almost none

    def observe(self, now: float, num_left: int, *, is_waiting: bool) -> None:
        """So many answers have just finished; `is_waiting`: others wait from now on."""
        self._answers, self._seconds = self._until(now)
        if self._waiting_since is not None:
            self._answers += num_left
            self._has_measured = self._has_measured or num_left > 0
        self._waiting_since = now if is_waiting else None

    def seconds_for(self, now: float, num_answers: int, guess: float) -> float:
        """Estimate of the time until so many answers have finished.

        Before the first one has finished it is `guess`, or the time waited so far, if that is longer.
        """
        answers, seconds = self._until(now)
        if not self._has_measured:
            return max(guess, seconds)
        return num_answers * seconds / answers if answers > 0 else math.inf

    def _until(self, now: float) -> tuple[float, float]:
        """Both sums as of now."""
        if self._waiting_since is None:
            return self._answers, self._seconds
        waited = now - self._waiting_since
        decay = math.exp(-waited / _RATE_SECONDS)
        return self._answers * decay, self._seconds * decay + waited


@dataclass(frozen=True)
class Limits:
    """The limits of the queue. None is no limit."""

    max_queued: int
    max_queued_tokens: int | None = None
    max_per_client: int | None = None


@dataclass(frozen=True)
class AdmissionRequest:
    """What a request asks for. `prompt_tokens`, of all answers, is an estimate: it is not tokenised yet."""

    client: str = ""
    num_answers: int = 1
    prompt_tokens: int = 0
    priority: int = 0  # lower is more urgent
    max_tokens: int = 0  # of each answer
    num_prompts: int = 1  # each of which has as many answers
    longest_prompt: int = 0  # of the estimate


@dataclass(frozen=True)
class AnswerLimits:
    """One answer of a request: how long its prompt is, and the most tokens that it may have."""

    prompt_tokens: int
    max_tokens: int
    num_shared: int = 0  # of the prompt's tokens, in KV blocks of another answer of the same request


@dataclass(frozen=True)
class Load:
    """The load at the arrival of a request."""

    num_admitted: int  # answers admitted and not finished
    max_running: int
    waiting: int  # as the engine says: it may lack memory for more than it runs
    max_queued: int
    queued_tokens: int = 0  # of prompts whose answers have not begun
    max_queued_tokens: int | None = None

    @property
    def depth(self) -> int:
        """Answers that wait."""
        return max(self.num_admitted - self.max_running, self.waiting, 0)

    @property
    def fullness(self) -> float:
        """Fraction of the queue that is taken, by requests or by tokens; 0 while none waits."""
        if not self.depth:
            return 0.0
        by_tokens = self.queued_tokens / self.max_queued_tokens if self.max_queued_tokens else 0.0
        return max(self.depth / self.max_queued if self.max_queued else 1.0, by_tokens)


def shed_reason(load: Load, asked: AdmissionRequest, dice: float) -> str | None:
    """Why a request is shed, or None. `dice` is uniform in [0, 1)."""
    full = load.waiting > 0 and load.waiting >= load.max_queued
    if full or load.num_admitted + asked.num_answers - load.max_running > load.max_queued:
        return "queue_full"
    if too_many_tokens(load, asked.prompt_tokens):
        return "queue_full"
    shed_from = SHED_LOW_FROM if asked.priority > 0 else SHED_FROM
    if asked.priority >= 0 and dice < (load.fullness - shed_from) / _SHED_WIDTH:
        return "load_shed"
    return None


@dataclass(frozen=True)
class Claim:
    """KV tokens that answers which have not started are expected to need, prompts included: each grows for
    itself.
    """

    num_answers: int = 0
    tokens: float = 0.0

    def __add__(self, other: Claim) -> Claim:
        return Claim(self.num_answers + other.num_answers, self.tokens + other.tokens)

    def __sub__(self, other: Claim) -> Claim:
        return Claim(self.num_answers - other.num_answers, self.tokens - other.tokens)

    def __rmul__(self, number: int) -> Claim:
        return Claim(number * self.num_answers, number * self.tokens)


@dataclass(frozen=True)
class KVDemand:
    """What the admitted answers are expected to take of the KV cache, in tokens."""

    num_running: int
    running: float  # held by running answers, blocks that they share once, and what each will need beside it
    waiting: Claim  # of those in the engine's queue, and those that it has not reported yet

    def beside(self, num_rows: int) -> float:
        """The demand of as many answers as there are rows, the newest: an answer that takes the next row runs
        beside those. Where all rows are taken, the others have ended by then.
        """
        num_waiting = min(self.waiting.num_answers, num_rows)
        num_running = min(self.num_running, num_rows - num_waiting)
        return _share(self.waiting.tokens, num_waiting, self.waiting.num_answers) + _share(
            self.running, num_running, self.num_running
        )


def _share(total: float, part: int, whole: int) -> float:
    return total * part / whole if part else 0.0


def kv_demand(info: EngineInfo, stats: EngineStats, unseen: Claim) -> KVDemand:
    """The demand as of the engine's last stats, and of what was admitted since."""
    held = stats.kv_utilization * info.num_blocks + stats.growth_blocks
    queued = Claim(stats.waiting + stats.deferred, stats.waiting_blocks * info.block_size)
    return KVDemand(stats.running, held * info.block_size, queued + unseen)


def is_short_of_memory(info: EngineInfo, demand: KVDemand, claim: Claim, priority: int) -> bool:
    """Whether a request and the answers that it runs beside are expected to grow beyond MEMORY_LIMIT.

    Where nothing else is admitted, a request may fill the cache; an urgent one can preempt others, so it is
    admitted to wait for their blocks.
    """
    is_alone = not (demand.num_running or demand.waiting.num_answers)
    if is_alone or priority < 0:
        return False
    num_rows = min(claim.num_answers, info.max_num_seqs)
    beside = demand.beside(info.max_num_seqs - num_rows)
    own = _share(claim.tokens, num_rows, claim.num_answers)
    return beside + own > MEMORY_LIMIT * info.kv_capacity


def too_many_tokens(load: Load, prompt_tokens: int) -> bool:
    """Whether a prompt exceeds the limit of queued tokens; where none wait it may be of any length."""
    limit = load.max_queued_tokens
    return limit is not None and load.queued_tokens > 0 and load.queued_tokens + prompt_tokens > limit


class Reservation:
    """One request's share of the queue: none until it is claimed, and none once it is released."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._asked: AdmissionRequest | None = None
        self._queued: dict[int, int] = {}  # prompt tokens by answer that has not begun, as far as known
        self._unseen: dict[int, Claim] = {}  # by answer that the engine's stats do not take into account yet
        self._num_begun = 0

    def claim(self, asked: AdmissionRequest, info: EngineInfo, stats: EngineStats) -> None:
        """Take what the parsed request asks for. Raises ApiError where there is no room for it.

        An estimate beyond the context takes no tokens: tokenising, off the event loop, decides whether the
        prompt is refused for good, and `set_answers` whether there is room for one that fits after all.
        """
        if asked.longest_prompt > info.max_prompt_tokens:
            asked = replace(asked, prompt_tokens=0)
        claim = self._admission.admit(asked, info, stats)
        self._asked = asked
        self._queued = {0: asked.prompt_tokens}
        self._unseen = {0: claim}

    def set_answers(self, answers: Sequence[AnswerLimits], stats: EngineStats) -> None:
        """Replace the estimate by what is known of each answer. Raises ApiError."""
        assert self._asked is not None
        self._admission.queue_tokens(-sum(self._queued.values()))
        self._queued = {}
        self._see(list(self._unseen))
        claims = self._admission.check_answers(self._asked, answers, stats)
        self._queued = {number: answer.prompt_tokens for number, answer in enumerate(answers)}
        self._unseen = dict(enumerate(claims))
        self._admission.queue_tokens(sum(self._queued.values()))

    def received(self, answer: int) -> None:
        """The engine's stats take an answer into account from now on."""
        if answer in self._unseen:  # a second try is received again
            self._see([answer])

    def begin(self, answer: int) -> None:
        """The first token of an answer came: its prompt waits no longer."""
        if (prompt_tokens := self._queued.pop(answer, None)) is not None:  # a second try begins again
            self._num_begun += 1
            self._admission.queue_tokens(-prompt_tokens)

    def retry_after(self) -> int:
        """As of Admission."""
        return self._admission.retry_after()

    def release(self) -> None:
        """Give everything back."""
        if self._asked is not None:
            self._admission.queue_tokens(-sum(self._queued.values()))
            self._see(list(self._unseen))
            self._admission.release(self._asked, self._num_begun)
            self._asked = None

    def _see(self, answers: Sequence[int]) -> None:
        for answer in answers:
            self._admission.unseen -= self._unseen.pop(answer)


class Admission:
    """What is admitted, and what the engine can hold."""

    def __init__(
        self, limits: Limits, clock: Callable[[], float], on_change: Callable[[int, int], None]
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_change = on_change  # (admitted answers, prompt tokens that wait)
        self._rate = ServiceRate()
        self._per_client = Counter[str]()
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._answer_lengths = OutputLengthEstimator()
        self.num_admitted = 0
        self.queued_tokens = 0
        self.unseen = Claim()  # of admitted answers that the engine's stats do not take into account yet

    def reserve(self, client: str, info: EngineInfo, stats: EngineStats) -> Reservation:
        """Before the body is read. Raises ApiError where no body could be admitted; the caller has to
        `release` the reservation.
        """
        # The least that a request can ask for: one answer, at the highest priority.
        self._check_queue(AdmissionRequest(client, priority=-1), info, stats)
        return Reservation(self)

    def admit(self, asked: AdmissionRequest, info: EngineInfo, stats: EngineStats) -> Claim:
        """Count a parsed request as admitted; returns its claim on the KV cache. Raises ApiError."""
        self._check_queue(asked, info, stats)
        length = asked.prompt_tokens // asked.num_answers
        first = self._claim(AnswerLimits(length, asked.max_tokens))
        other = self._claim(AnswerLimits(length, asked.max_tokens, info.num_shared_tokens(length)))
        claim = asked.num_prompts * first + (asked.num_answers - asked.num_prompts) * other
        may_fit = asked.longest_prompt <= info.max_prompt_tokens and asked.prompt_tokens < info.kv_capacity
        if may_fit:  # else tokenising decides whether it ever can
            self._check_memory(asked, claim)
        self.unseen += claim
        self.num_admitted += asked.num_answers
        self._per_client[asked.client] += asked.num_answers
        self._changed(0)
        self.queue_tokens(asked.prompt_tokens)
        return claim

    def load(self, info: EngineInfo, stats: EngineStats) -> Load:
        """The load now."""
        return Load(
            self.num_admitted,
            info.max_num_seqs,
            stats.waiting,
            self._limits.max_queued,
            self.queued_tokens,
            self._limits.max_queued_tokens,
        )

    def retry_after(self) -> int:
        """Seconds until what waits now is served, at the rate at which answers finish."""
        assert self._info is not None
        load = self.load(self._info, self._stats)
        # Nothing measured yet: a second for each batch that has to finish first.
        guess = 1 + load.depth // load.max_running
        seconds = self._rate.seconds_for(self._clock(), max(load.depth, 1), guess)
        return math.ceil(min(max(seconds, 1), _MAX_RETRY_AFTER))

    def check_answers(
        self, asked: AdmissionRequest, answers: Sequence[AnswerLimits], stats: EngineStats
    ) -> list[Claim]:
        """The claim of each answer, counted as unseen. Raises ApiError where there is no room for them."""
        assert self._info is not None
        self._stats = stats  # as new as `unseen`: between the two no answer may be missing
        if too_many_tokens(self.load(self._info, stats), sum(answer.prompt_tokens for answer in answers)):
            limit = self._limits.max_queued_tokens
            message = f"{self.queued_tokens} prompt tokens are waiting, of at most {limit}"
            raise overloaded("queue_full", message, self.retry_after())
        claims = [self._claim(answer) for answer in answers]
        claim = sum(claims, start=Claim())
        self._check_memory(asked, claim)
        self.unseen += claim
        return claims

    def learn_answer(self, limits: AnswerLimits, length: int) -> None:
        """An answer has ended at this length, in tokens."""
        self._answer_lengths.learn(limits.prompt_tokens, limits.max_tokens, length)

    def _claim(self, limits: AnswerLimits) -> Claim:
        expected = self._answer_lengths.expect(limits.prompt_tokens, limits.max_tokens)
        return Claim(1, limits.prompt_tokens - limits.num_shared + expected)

    def queue_tokens(self, num_tokens: int) -> None:
        """So many more prompt tokens wait; a negative number waits no longer."""
        self.queued_tokens += num_tokens
        self._on_change(self.num_admitted, self.queued_tokens)

    def release(self, asked: AdmissionRequest, num_served: int) -> None:
        """A request has ended; so many of its answers were served."""
        self.num_admitted -= asked.num_answers
        self._per_client[asked.client] -= asked.num_answers
        if not self._per_client[asked.client]:
            del self._per_client[asked.client]
        self._changed(num_served)

    def _check_queue(self, asked: AdmissionRequest, info: EngineInfo, stats: EngineStats) -> None:
        self._info, self._stats = info, stats
        self._check_client(asked)
        load = self.load(info, stats)
        reason = shed_reason(load, asked, random.random())
        if reason is not None:
            message = f"{load.depth} requests are waiting, of at most {self._limits.max_queued}"
            if load.queued_tokens and load.max_queued_tokens:
                message += f", with {load.queued_tokens} prompt tokens, of at most {load.max_queued_tokens}"
            raise overloaded(reason, message, self.retry_after())

    def _changed(self, num_served: int) -> None:
        assert self._info is not None
        is_waiting = self.num_admitted > 0 and self.load(self._info, self._stats).depth > 0
        self._rate.observe(self._clock(), num_served, is_waiting=is_waiting)
        self._on_change(self.num_admitted, self.queued_tokens)

    def _check_client(self, asked: AdmissionRequest) -> None:
        limit, present = self._limits.max_per_client, self._per_client[asked.client]
        if limit is not None and present + asked.num_answers > limit:
            message = f"{present} requests with this key are running or waiting, of at most {limit}"
            raise limited(message, self.retry_after())

    def _check_memory(self, asked: AdmissionRequest, claim: Claim) -> None:
        info = self._info
        assert info is not None
        if info.pooling:
            return  # its blocks stand for no memory
        demand = kv_demand(info, self._stats, self.unseen)
        if is_short_of_memory(info, demand, claim, asked.priority):
            message = (
                f"{self._stats.kv_utilization:.0%} of the KV cache is in use by running requests. With what "
                f"they and {demand.waiting.num_answers} waiting answers are expected to need, the "
                f"{claim.tokens:.0f} tokens of this request's prompt and expected answer would take it "
                f"beyond {MEMORY_LIMIT:.0%} of {info.kv_capacity} tokens"
            )
            raise overloaded("memory_pressure", message, self.retry_after())
