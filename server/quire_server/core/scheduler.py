"""What to compute next: one token budget for every request, no phases.

The pipeline calls ``schedule``, hands the Step to the runner, and gives the result to ``commit``. Each
sequence has ``num_computed`` chasing ``len(tokens)``: a decode lacks one token, a prompt many, a prefix hit
fewer, a preempted sequence all of them again. Single tokens of running sequences go first, then prompts in
the order of the policy, those that run before those that wait, but for what is urgent (``admission``); drafts
get what is left. When no block is free, the last running sequence gives its blocks back and waits; the first
one can therefore always go on. Knows nothing of tensors or text.
"""

import time
from collections.abc import Callable, Collection
from itertools import islice

from quire_server.core import displacement, fitting, stopping
from quire_server.core.admission import Admission
from quire_server.core.arrivals import Arrivals
from quire_server.core.decodes import columns, count, event, report
from quire_server.core.flight import Flight, assumed, going_on, num_growing
from quire_server.core.handover import Turns, step_of
from quire_server.core.kv_manager import KVManager
from quire_server.core.lifecycle import Lifecycle
from quire_server.core.limits import SchedulerConfig, SchedulerStats
from quire_server.core.request import FinishReason, Request
from quire_server.core.sequence import Sequence, Status
from quire_server.core.speculation import Speculator, held
from quire_server.core.speculation_stats import SpeculationStats
from quire_server.core.step import IMPOSSIBLE, Step, StepEvents, StepResult, TokenEvent, failure

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """``schedule`` may be one step ahead of ``commit``; ``add`` and ``abort`` come at any time."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._arrivals = Arrivals(config, eos_token_ids)
        self.kv = KVManager(config, clock)
        self._life = Lifecycle(config, self.kv, self._arrivals)
        self._admission = Admission(config, self.kv, self._life, self._give_up)
        self._speculator = Speculator(config.speculation, clock) if config.speculation else None
        self._flights: list[Flight] = []  # at most two, the older one first
        self._failures: list[TokenEvent] = []  # told by the next commit
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return len(self._life.running.sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences that own nothing yet, or nothing any more."""
        return len(self._life.sequences) - len(self._life.running.sequences)

    @property
    def kv_utilization(self) -> float:
        """Share of blocks in use; cached ones count as free."""
        return self.kv.utilization

    @property
    def num_unaccounted_blocks(self) -> int:
        """KV blocks that are neither free nor anybody's: not 0 when the books are wrong. O(blocks in use)."""
        return self.kv.num_unaccounted(self._life.running.sequences)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to commit."""
        return bool(self._life.sequences or self._failures or self._flights)

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start."""
        speculation = self._speculator.stats() if self._speculator is not None else SpeculationStats()
        return SchedulerStats(self._life.preemptions, speculation)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is answered by the next commit with an error event."""
        if request.request_id in self._life.sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if refusal := fitting.refusal(request, self.config):
            self._failures.append(failure(request.request_id, refusal))
            return
        self._life.arrive(self._arrivals.sequence(request))

    def abort(self, request_id: str) -> None:
        """Forget a request (unknown ids are fine: it may just have finished). No event follows."""
        self._failures = [event for event in self._failures if event.request_id != request_id]
        if (sequence := self._life.sequences.get(request_id)) is not None:
            self._disturb()
            self._life.finish(sequence)

    def end(self, request_id: str) -> None:
        """Forget a request whose answer has ended by what only the caller sees, a stop string."""
        if (sequence := self._life.sequences.get(request_id)) is not None:
            self._arrivals.answered(sequence)
        self.abort(request_id)

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. One without rows only carries failures to
        commit, or waits for KV blocks from the disk.

        While a step is in flight: the one after it, or None where it cannot be decided without the result.
        """
        if self._flights:
            return self._schedule_ahead()
        if not self.has_work:
            return None
        life = self._life
        for victim in self._displaced():
            life.preempt(victim)
        num_preempted = life.preemptions
        turns = Turns()
        prompts = self._continue_running(life.running.sequences, turns)
        has_room = life.preemptions == num_preempted
        if not (has_room or turns.singles or prompts):
            return self.schedule()  # everything that ran was preempted or failed: there is room now
        return self._take_off(turns, prompts, has_room=has_room)

    def commit(self, step: Step, result: StepResult) -> StepEvents:
        """Take in what the runner computed: count it, publish full blocks, append tokens, finish."""
        flight = self._flights.pop(0)
        assert step.step_id == result.step_id == flight.step.step_id, (step.step_id, result.step_id)
        in_flight, num_living = flight.sequences, len(self._life.sequences)
        others, self._failures = self._failures, []
        missing = self.kv.settle(result)
        is_disturbed = missing or result.failures or flight.is_disturbed
        num_plain = 0 if is_disturbed else flight.num_continuing
        request_ids, token_ids = self._commit_decodes(in_flight[:num_plain], result, others)
        tokens, drafts = iter(result.token_ids[num_plain:]), dict(result.drafts or step.drafts)
        for sequence, num_tokens, samples in zip(
            in_flight[num_plain:], step.num_tokens[num_plain:], step.samples[num_plain:], strict=True
        ):
            mine = drafts.get(sequence.row, ())
            sampled = list(islice(tokens, 1 + len(mine) if samples else 0))
            if sequence.status is not Status.RUNNING:
                continue  # it ended while the step ran
            if missing and not missing.isdisjoint(sequence.block_ids):
                self._life.restart(sequence)
                continue
            if result.failures and (why := result.failures.get(sequence.row)) is not None:
                if why not in IMPOSSIBLE:
                    self.kv.distrust(sequence)
                self._life.finish(sequence)
                others.append(failure(sequence.request.request_id, why))
                continue
            others += report(sequence, result)
            if samples:
                others.append(self._commit_samples(sequence, num_tokens - samples, mine, sampled, result))
            else:
                sequence.num_computed += num_tokens
                self._publish(sequence)
        if len(self._life.sequences) < num_living:
            self._disturb()
        if self._speculator is not None:
            self._speculator.end(result)
        return StepEvents(request_ids, token_ids, others)

    def check(self) -> None:
        """Raise AssertionError when block or row accounting does not add up."""
        self.kv.check(self._life.sequences.values())
        self._life.running.check()

    def _schedule_ahead(self) -> Step | None:
        """The step after the one in flight. Nobody gives way for it: neither a row nor a block is taken from
        a sequence whose next token is on its way, so that a result always finds its sequence as it left it.
        """
        if len(self._flights) > 1 or not self.config.may_look_ahead or self._displaced():
            return None
        with assumed(self._flights[0]):
            running = going_on(self._life.running.sequences)
            if num_growing(running) > self.kv.num_free:
                return None
            turns = Turns()
            prompts = self._continue_running(running, turns)
            return self._take_off(turns, prompts, has_room=True)

    def _displaced(self) -> list[Sequence]:
        """Who has to go for the sake of the most urgent waiting sequence."""
        life = self._life
        if (first := life.waiting.first()) is None or life.is_blocked:
            return []
        return displacement.victims(first, life.running, self.kv, self.config)

    def _take_off(self, turns: Turns, prompts: list[Sequence], *, has_room: bool) -> Step | None:
        """The step of these turns, and of whoever gets what they leave; no empty one ahead of another."""
        budget = self._admission.deal(turns, prompts, admits=has_room)
        if self._speculator is not None:
            turns.drafts = self._speculator.draft(turns.singles, budget, self.kv, turns.grown)
        num_continuing = len(turns.singles)
        turns.singles += turns.newcomers
        sequences = turns.in_order()
        if self._flights and not sequences:
            return None
        self._num_steps += 1
        if self._speculator is not None:
            self._speculator.begin(len(sequences), len(turns.drafts), has_prompts=bool(turns.chunks))
        step = step_of(self._num_steps, turns, sequences, self.kv.copies())
        self._flights.append(Flight(step, sequences, num_continuing))
        return step

    def _disturb(self) -> None:
        """Somebody ended: steps in flight may still compute for him."""
        for flight in self._flights:
            flight.is_disturbed = True

    def _continue_running(self, running: list[Sequence], turns: Turns) -> list[Sequence]:
        """Give a turn to sequences that lack one token, each with its block; returns those in the middle of
        their prompt.
        """
        singles, grown, prompts = turns.singles, turns.grown, list[Sequence]()
        budget = self.config.token_budget
        is_tight = len(running) > budget
        for sequence in running:  # which preemption shortens from behind
            num_computed = sequence.num_computed
            if num_computed + 1 < len(sequence.tokens):
                prompts.append(sequence)
                continue
            if is_tight and len(singles) == budget:
                break
            if num_computed == sequence.capacity:
                block_id = self._grow(sequence)
                if block_id is None:
                    break  # it was the last one, and is gone
                grown.append((sequence.row, block_id))
            singles.append(sequence)
        return [sequence for sequence in prompts if sequence.status is Status.RUNNING]

    def _grow(self, sequence: Sequence) -> int | None:
        """A block for the next token, at the expense of later sequences; None when it has to go itself."""
        running = self._life.running.sequences
        while (block_id := self.kv.grow(sequence)) is None:
            victim = running[-1]
            if victim is sequence and len(running) == 1:
                if self.kv.yield_pins():
                    continue
                self._life.preemptions += 1
                self._give_up(sequence, len(sequence.block_ids) + 1)
                return None
            self._life.preempt(victim)
            if victim is sequence:
                return None
        return block_id

    def _give_up(self, sequence: Sequence, num_blocks: int) -> None:
        """It needs more blocks than there are."""
        why = fitting.too_long(num_blocks, self.config)
        self._failures.append(failure(sequence.request.request_id, why))
        self._life.finish(sequence)

    def _commit_decodes(
        self, decodes: list[Sequence], result: StepResult, others: list[TokenEvent]
    ) -> tuple[list[str], list[int]]:
        """One more token for each: columns of (request, token), and events where there is more to say."""
        token_ids, told = result.token_ids[: len(decodes)], set[Sequence]()
        for sequence in count(decodes, token_ids):
            self._publish(sequence)
            reason = stopping.finish_reason(sequence)
            if reason is not None or sequence.request.sampling.logprobs is not None:
                others.append(self._event(sequence, 1, reason, result))
                told.add(sequence)
        return columns(decodes, token_ids, told)

    def _commit_samples(
        self,
        sequence: Sequence,
        num_before: int,
        drafts: tuple[int, ...],
        sampled: list[int],
        result: StepResult,
    ) -> TokenEvent:
        """Take what the model sampled after the drafts that hold, and count the tokens that stay."""
        num_held = held(drafts, sampled)
        count, reason = stopping.extend(sequence, sampled[: num_held + 1])
        sequence.num_computed += num_before + count
        self._publish(sequence)
        if drafts and self._speculator is not None:
            self._speculator.learn(sequence, len(drafts), num_held)
        return self._event(sequence, count, reason, result)

    def _publish(self, sequence: Sequence) -> None:
        if sequence.num_computed >= (sequence.num_published + 1) * self.config.block_size:
            self.kv.publish(sequence)
        sequence.watch(self.config.block_size)

    def _event(
        self, sequence: Sequence, count: int, reason: FinishReason | None, result: StepResult
    ) -> TokenEvent:
        told = event(sequence, count, reason, result)
        if reason is not None:
            self._arrivals.answered(sequence)
            self._life.finish(sequence)
        return told
