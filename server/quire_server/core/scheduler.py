"""What to compute next: one token budget for every request, no phases.

The engine loop calls ``schedule``, hands the Step to the runner, and gives the result to ``commit``. Each
sequence has ``num_computed`` chasing ``len(tokens)``: a decode lacks one token, a prompt many, a prefix hit
fewer, a preempted sequence all of them again. Running sequences go first (single tokens before chunks of
prompts), then waiting ones, in order of arrival. When no block is free, the last running sequence gives its
blocks back and waits; the first one can therefore always go on. Knows nothing of tensors or text.
"""

import hashlib
import time
from bisect import insort
from collections.abc import Callable, Collection

from quire_server.core import fitting, stopping
from quire_server.core.kv_manager import KVManager, Match
from quire_server.core.limits import SchedulerConfig, SchedulerStats
from quire_server.core.request import FinishReason, Request
from quire_server.core.sequence import Sequence, Status, start, started_row
from quire_server.core.step import StartedRow, Step, StepResult, TokenEvent
from quire_server.core.waiting import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Synchronous: ``schedule`` and ``commit`` alternate; ``add`` and ``abort`` come at any time."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._eos_ids = frozenset(eos_token_ids)
        self._stats = SchedulerStats()
        self.kv = KVManager(config, clock)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # sorted by order, so that the last one is the one to preempt
        self._rows = list(
            range(config.max_num_seqs - 1, -1, -1)
        )  # free rows of the runner; the lowest is next
        self._in_flight: list[Sequence] = []  # of the current step, in its order
        self._failures: list[TokenEvent] = []  # told by the next commit
        self._num_arrivals = self._num_steps = 0
        self._is_blocked = False  # the first waiting sequence did not fit, and nothing came free since

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that own nothing yet, or nothing any more."""
        return len(self._sequences) - len(self._running)

    @property
    def kv_utilization(self) -> float:
        """Share of blocks in use; cached ones count as free."""
        return self.kv.utilization

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` would return a step."""
        return bool(self._sequences or self._failures)

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start."""
        return self._stats

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is answered by the next commit with an error event."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if refusal := fitting.refusal(request, self.config):
            self._failures.append(_failure(request.request_id, refusal))
            return
        seed = request.sampling.seed
        if seed is None:
            drawn = hashlib.sha256(f"{self.config.seed}:{request.request_id}".encode()).digest()
            seed = int.from_bytes(drawn[:8], "big", signed=True)
        self._num_arrivals += 1
        sequence = start(
            request,
            number=self._num_arrivals,
            seed=seed,
            eos_ids=self._eos_ids,
            max_model_len=self.config.max_model_len,
        )
        self._sequences[request.request_id] = sequence
        self._is_blocked = False
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request (unknown ids are fine: it may just have finished). No event follows."""
        self._failures = [event for event in self._failures if event.request_id != request_id]
        if (sequence := self._sequences.get(request_id)) is not None:
            self._finish(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. One without rows only carries failures to
        commit, or waits for KV blocks from the disk.
        """
        assert not self._in_flight, "the previous step was not committed"
        if not self.has_work:
            return None
        num_preempted = self._stats.preemptions
        grown: list[tuple[int, int]] = []
        singles, prompts = self._continue_running(grown)
        budget = self.config.token_budget - len(singles)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in prompts:
            if budget == 0:
                break
            chunks.append((sequence, min(budget, len(sequence.tokens) - sequence.num_computed)))
            budget -= chunks[-1][1]
        started: list[StartedRow] = []
        if self._stats.preemptions == num_preempted:
            admitted = self._admit(budget, started)
            # A newcomer decodes only when the cache holds all the rest; one token of more is a chunk.
            for sequence, n in admitted:
                if sequence.num_computed + 1 == len(sequence.tokens):
                    singles.append(sequence)
                else:
                    chunks.append((sequence, n))
        elif not singles and not chunks:
            return self.schedule()  # everything that ran was preempted or failed: there is room now
        return self._step(singles, chunks, started, grown)

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Take in what the runner computed: count it, publish full blocks, append tokens, finish."""
        assert step.step_id == result.step_id == self._num_steps, (step.step_id, result.step_id)
        events, self._failures = self._failures, []
        tokens = iter(result.token_ids)
        block_size = self.config.block_size
        missing = self.kv.settle(result)
        for sequence, num_tokens, samples in zip(self._in_flight, step.num_tokens, step.samples, strict=True):
            token = next(tokens) if samples else -1
            if sequence.status is not Status.RUNNING:
                continue  # aborted while the step ran
            if missing and not missing.isdisjoint(sequence.block_ids):
                self._restart(sequence)
                continue
            sequence.num_computed += num_tokens
            is_sound = not result.failures or sequence.row not in result.failures
            if is_sound and sequence.num_computed >= (sequence.num_published + 1) * block_size:
                self.kv.publish(sequence)
            if samples:
                events.append(self._append(sequence, token, result))
        self._in_flight = []
        return events

    def check(self) -> None:
        """Raise AssertionError when block or row accounting does not add up."""
        self.kv.check(self._sequences.values())
        rows = sorted([*self._rows, *(sequence.row for sequence in self._running)])
        assert rows == list(range(self.config.max_num_seqs)), "rows"
        assert [s.order for s in self._running] == sorted(s.order for s in self._running), "order"

    def _continue_running(self, grown: list[tuple[int, int]]) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that lack one token (each with its block), and those in the middle of their prompt."""
        singles: list[Sequence] = []
        prompts: list[Sequence] = []
        running, budget = self._running, self.config.token_budget
        index = 0
        while index < len(running):  # preemption shortens the list from behind
            sequence = running[index]
            index += 1
            if len(sequence.tokens) - sequence.num_computed > 1:
                prompts.append(sequence)
                continue
            if len(singles) == budget:
                break
            if sequence.num_computed == sequence.capacity:
                block_id = self._grow(sequence)
                if block_id is None:
                    break  # it was the last one, and is gone
                grown.append((sequence.row, block_id))
            singles.append(sequence)
        return singles, [sequence for sequence in prompts if sequence.status is Status.RUNNING]

    def _grow(self, sequence: Sequence) -> int | None:
        """A block for the next token, at the expense of later sequences; None when it has to go itself."""
        while (block_id := self.kv.grow(sequence)) is None:
            victim = self._running[-1]
            if victim is sequence and len(self._running) == 1:
                if self.kv.yield_pins():
                    continue
                needed = len(sequence.block_ids) + 1
                self._failures.append(
                    _failure(sequence.request.request_id, fitting.too_long(needed, self.config))
                )
                self._stats.preemptions += 1
                self._finish(sequence)
                return None
            self._preempt(victim)
            if victim is sequence:
                return None
        return block_id

    def _admit(self, budget: int, started: list[StartedRow]) -> list[tuple[Sequence, int]]:
        """Waiting sequences, in order, as long as budget, rows and blocks last: no overtaking."""
        admitted: list[tuple[Sequence, int]] = []
        while budget > 0 and self._rows and not self._is_blocked:
            if (sequence := self._waiting.first()) is None:
                break
            if (match := self.kv.match(sequence)) is None:
                break  # a part of its prefix is on its way from the disk
            lacking = len(sequence.tokens) - match.num_cached
            if lacking > budget and not self.config.enable_chunked_prefill:
                break
            if not self.kv.fits(match, alone=not self._running):
                self._is_blocked = True
                break
            self._waiting.pop()
            started.append(self._start(sequence, match))
            admitted.append((sequence, min(budget, lacking)))
            budget -= admitted[-1][1]
        return admitted

    def _start(self, sequence: Sequence, match: Match) -> StartedRow:
        sequence.become(Status.RUNNING)
        sequence.row = self._rows.pop()
        self.kv.start(sequence, match)
        insort(self._running, sequence, key=lambda other: other.order)
        return started_row(sequence)

    def _step(
        self,
        singles: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        started: list[StartedRow],
        grown: list[tuple[int, int]],
    ) -> Step:
        self._num_steps += 1
        self._in_flight = in_flight = singles + [sequence for sequence, _ in chunks]
        return Step(
            step_id=self._num_steps,
            started=tuple(started),
            grown=tuple(grown),
            rows=tuple([sequence.row for sequence in in_flight]),
            starts=tuple([sequence.num_computed for sequence in in_flight]),
            num_tokens=(1,) * len(singles) + tuple(n for _, n in chunks),
            samples=(True,) * len(singles) + tuple(s.num_computed + n == len(s.tokens) for s, n in chunks),
            copies=self.kv.copies(),
        )

    def _append(self, sequence: Sequence, token: int, result: StepResult) -> TokenEvent:
        request_id = sequence.request.request_id
        if result.failures and (failure := result.failures.get(sequence.row)) is not None:
            self.kv.distrust(sequence)
            self._finish(sequence)
            return _failure(request_id, failure)
        sequence.tokens.append(token)
        logprobs = result.logprobs.get(sequence.row) if result.logprobs else None
        reason = stopping.finish_reason(sequence)
        if reason is not None:
            self._finish(sequence)
        cached = sequence.num_cached_tokens or 0
        return TokenEvent(request_id, (token,), (logprobs,) if logprobs else None, reason, None, cached)

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.preemptions += 1
        self.kv.preempt(sequence)
        self._leave_row(sequence)
        sequence.become(Status.WAITING)
        self._waiting.push(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.kv.finish(sequence)
        if sequence.status is Status.RUNNING:
            self._leave_row(sequence)
        self._is_blocked = False  # whoever waited behind it may fit
        sequence.become(Status.FINISHED)
        del self._sequences[sequence.request.request_id]

    def _restart(self, sequence: Sequence) -> None:
        """A block of its prefix did not come from a lower tier as it was: what it computed is void."""
        self.kv.spoilt(sequence)
        self._leave_row(sequence)
        sequence.become(Status.WAITING)
        self._waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._rows.append(sequence.row)
        self._is_blocked = False


def _failure(request_id: str, message: str) -> TokenEvent:
    return TokenEvent(request_id, (), finish_reason=FinishReason.ERROR, error=message)
