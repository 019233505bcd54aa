"""What to compute next: one token budget for every request, no phases.

The engine loop calls ``schedule``, hands the Step to the runner, and gives the result to ``commit``. Each
sequence has ``num_computed`` chasing ``len(tokens)``: a decode lacks one token, a prompt many, a prefix hit
fewer, a preempted sequence all of them again. Running sequences go first (single tokens before chunks of
prompts), then waiting ones, in the order of the policy. When no block is free, the last running sequence
gives its blocks back and waits; the first one can therefore always go on. Knows nothing of tensors or text.
"""

import time
from collections.abc import Callable, Collection

from quire_server.core import displacement, fitting, stopping
from quire_server.core.arrivals import Arrivals
from quire_server.core.decodes import columns, count, event, report
from quire_server.core.handover import Chunk, started_row, step_of
from quire_server.core.kv_manager import KVManager, Match
from quire_server.core.limits import Batching, SchedulerConfig, SchedulerStats
from quire_server.core.request import FinishReason, Request
from quire_server.core.running import Running
from quire_server.core.sequence import Sequence, Status
from quire_server.core.step import StartedRow, Step, StepEvents, StepResult, TokenEvent, failure
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
        self._arrivals = Arrivals(config, eos_token_ids)
        self._stats = SchedulerStats()
        self.kv = KVManager(config, clock)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running = Running(config.max_num_seqs)
        self._in_flight: list[Sequence] = []  # of the current step, in its order
        self._num_continuing = 0  # the first ones of these: they ran before, and lack one token
        self._failures: list[TokenEvent] = []  # told by the next commit
        self._num_steps = 0
        self._was_aborted_in_flight = False
        self._is_blocked = False  # the first waiting sequence did not fit, and nothing came free since
        self._is_closed = False  # static batching: the batch has begun, and nobody joins

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return len(self._running.sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences that own nothing yet, or nothing any more."""
        return len(self._sequences) - len(self._running.sequences)

    @property
    def kv_utilization(self) -> float:
        """Share of blocks in use; cached ones count as free."""
        return self.kv.utilization

    @property
    def num_unaccounted_blocks(self) -> int:
        """KV blocks that are neither free nor anybody's: not 0 when the books are wrong. O(blocks in use)."""
        return self.kv.num_unaccounted(self._running.sequences)

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
            self._failures.append(failure(request.request_id, refusal))
            return
        sequence = self._arrivals.sequence(request)
        self._sequences[request.request_id] = sequence
        self._is_blocked = False
        self._waiting.push(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request (unknown ids are fine: it may just have finished). No event follows."""
        self._failures = [event for event in self._failures if event.request_id != request_id]
        if (sequence := self._sequences.get(request_id)) is not None:
            self._was_aborted_in_flight = bool(self._in_flight)
            self._finish(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. One without rows only carries failures to
        commit, or waits for KV blocks from the disk.
        """
        assert not self._in_flight, "the previous step was not committed"
        if not self.has_work:
            return None
        if (first := self._waiting.first()) is not None and not self._is_blocked:
            for victim in displacement.victims(first, self._running, self.kv, self.config):
                self._preempt(victim)
        num_preempted = self._stats.preemptions
        grown: list[tuple[int, int]] = []
        singles, prompts = self._continue_running(grown)
        self._num_continuing = len(singles)
        budget = self.config.token_budget - len(singles)
        chunks: list[Chunk] = []
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
        self._num_steps += 1
        self._in_flight = singles + [sequence for sequence, _ in chunks]
        return step_of(self._num_steps, singles, chunks, started, grown, self.kv.copies())

    def commit(self, step: Step, result: StepResult) -> StepEvents:
        """Take in what the runner computed: count it, publish full blocks, append tokens, finish."""
        assert step.step_id == result.step_id == self._num_steps, (step.step_id, result.step_id)
        in_flight, self._in_flight = self._in_flight, []
        others, self._failures = self._failures, []
        missing = self.kv.settle(result)
        is_disturbed = missing or result.failures or self._was_aborted_in_flight
        num_plain = 0 if is_disturbed else self._num_continuing
        self._was_aborted_in_flight = False
        request_ids, token_ids = self._commit_decodes(in_flight[:num_plain], result, others)
        tokens = iter(result.token_ids[num_plain:])
        for sequence, num_tokens, samples in zip(
            in_flight[num_plain:], step.num_tokens[num_plain:], step.samples[num_plain:], strict=True
        ):
            token = next(tokens) if samples else -1
            if sequence.status is not Status.RUNNING:
                continue  # aborted while the step ran
            if missing and not missing.isdisjoint(sequence.block_ids):
                self._restart(sequence)
                continue
            others += report(sequence, result)
            sequence.num_computed += num_tokens
            if result.failures and (why := result.failures.get(sequence.row)) is not None:
                self.kv.distrust(sequence)
                self._finish(sequence)
                others.append(failure(sequence.request.request_id, why))
                continue
            if samples:
                sequence.tokens.append(token)
            self._publish(sequence)
            if samples:
                others.append(self._event(sequence, stopping.finish_reason(sequence), result))
        return StepEvents(request_ids, token_ids, others)

    def check(self) -> None:
        """Raise AssertionError when block or row accounting does not add up."""
        self.kv.check(self._sequences.values())
        self._running.check()

    def _continue_running(self, grown: list[tuple[int, int]]) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that lack one token (each with its block), and those in the middle of their prompt."""
        singles: list[Sequence] = []
        prompts: list[Sequence] = []
        budget = self.config.token_budget
        for sequence in self._running.sequences:  # which preemption shortens from behind
            num_computed = sequence.num_computed
            if num_computed + 1 < len(sequence.tokens):
                prompts.append(sequence)
                continue
            if len(singles) == budget:
                break
            if num_computed == sequence.capacity:
                block_id = self._grow(sequence)
                if block_id is None:
                    break  # it was the last one, and is gone
                grown.append((sequence.row, block_id))
            singles.append(sequence)
        return singles, [sequence for sequence in prompts if sequence.status is Status.RUNNING]

    def _grow(self, sequence: Sequence) -> int | None:
        """A block for the next token, at the expense of later sequences; None when it has to go itself."""
        while (block_id := self.kv.grow(sequence)) is None:
            victim = self._running.sequences[-1]
            if victim is sequence and len(self._running.sequences) == 1:
                if self.kv.yield_pins():
                    continue
                needed = len(sequence.block_ids) + 1
                self._failures.append(
                    failure(sequence.request.request_id, fitting.too_long(needed, self.config))
                )
                self._stats.preemptions += 1
                self._finish(sequence)
                return None
            self._preempt(victim)
            if victim is sequence:
                return None
        return block_id

    def _admit(self, budget: int, started: list[StartedRow]) -> list[Chunk]:
        """Waiting sequences, in order, as long as budget, rows and blocks last: no overtaking."""
        admitted: list[Chunk] = []
        self._is_closed &= bool(self._running.sequences)
        while budget > 0 and not (self._running.is_full or self._is_blocked or self._is_closed):
            if (sequence := self._waiting.first()) is None:
                break
            if (match := self.kv.match(sequence)) is None:
                break  # a part of its prefix is on its way from the disk
            lacking = len(sequence.tokens) - match.num_cached
            if lacking > budget and not self.config.enable_chunked_prefill:
                budget = 0
                break
            if not self.kv.fits(match, alone=not self._running.sequences):
                self._is_blocked = True
                break
            self._waiting.pop()
            started.append(self._start(sequence, match))
            admitted.append((sequence, min(budget, lacking)))
            budget -= admitted[-1][1]
        # Static: whoever the budget kept waiting may still join; later nobody.
        self._is_closed |= self.config.batching is Batching.STATIC and budget > 0
        return admitted

    def _start(self, sequence: Sequence, match: Match) -> StartedRow:
        sequence.become(Status.RUNNING)
        self._running.enter(sequence)
        self.kv.start(sequence, match)
        sequence.watch(self.config.block_size)
        return started_row(sequence)

    def _commit_decodes(
        self, decodes: list[Sequence], result: StepResult, others: list[TokenEvent]
    ) -> tuple[list[str], list[int]]:
        """One more token for each: columns of (request, token), and events where there is more to say."""
        token_ids, told = result.token_ids[: len(decodes)], set[Sequence]()
        for sequence in count(decodes, token_ids):
            self._publish(sequence)
            reason = stopping.finish_reason(sequence)
            if reason is not None or sequence.request.sampling.logprobs is not None:
                others.append(self._event(sequence, reason, result))
                told.add(sequence)
        return columns(decodes, token_ids, told)

    def _publish(self, sequence: Sequence) -> None:
        if sequence.num_computed >= (sequence.num_published + 1) * self.config.block_size:
            self.kv.publish(sequence)
        sequence.watch(self.config.block_size)

    def _event(self, sequence: Sequence, reason: FinishReason | None, result: StepResult) -> TokenEvent:
        told = event(sequence, reason, result)
        if reason is not None:
            self._arrivals.answered(sequence)
            self._finish(sequence)
        return told

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.preemptions += 1
        self.kv.preempt(sequence)
        self._leave_row(sequence)
        self._arrivals.interrupted(sequence)
        sequence.become(Status.WAITING)
        self._waiting.push(sequence)

    def _finish(self, sequence: Sequence) -> None:
        was_waiting = sequence.status is Status.WAITING
        self.kv.finish(sequence)
        if not was_waiting:
            self._leave_row(sequence)
        sequence.become(Status.FINISHED)
        if was_waiting:
            self._waiting.gone()
        self._is_blocked = False  # whoever waited behind it may fit
        del self._sequences[sequence.request.request_id]

    def _restart(self, sequence: Sequence) -> None:
        """A block of its prefix did not come from a lower tier as it was: what it computed is void."""
        self.kv.spoilt(sequence)
        self._leave_row(sequence)
        sequence.become(Status.WAITING)
        self._waiting.push(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self._running.leave(sequence)
        self._is_blocked = False
