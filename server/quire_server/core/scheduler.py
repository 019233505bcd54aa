"""Continuous batching: decides what the next forward pass computes, and takes its result in.

``schedule`` returns a Step for the model runner, ``commit`` takes the runner's StepResult. There are no
separate prefill and decode phases: in each sequence ``num_computed`` catches up with ``len(tokens)``. A
decode lacks one token, a prompt many, a prompt with a cached prefix fewer, a preempted sequence all of them
again.

A step is filled in this order, until its token budget is spent:

1. decodes: running sequences that lack one token. Where no KV block is free for one, sequences are preempted
   from the end of the running queue, so that the first one can always continue;
2. prefill chunks of running prompts, then waiting sequences, both in the order of the policy. A waiting
   sequence that may interrupt (see ``preemption``) goes before the chunks of running prompts behind it, or an
   urgent request would wait for the whole prefill of a long prompt. While requests of normal priority come,
   prompts that they would overtake get few tokens of a step, because who comes waits until a step has ended;
3. drafts of speculative decoding, from the budget and the blocks that nothing else needs.

Knows neither tensors nor text.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from quire_server.core import pipeline, preemption
from quire_server.core.adapter_slots import AdapterSlots
from quire_server.core.config import Batching, SchedulerConfig, rejection_reason, too_long_reason
from quire_server.core.kv_cache_manager import KVCacheManager, PrefixBlocks, PrefixMatch
from quire_server.core.low_priority_budget import LowPriorityBudget
from quire_server.core.pipeline import SlotLoad
from quire_server.core.request import FinishReason, Request
from quire_server.core.request_queue import RequestQueue
from quire_server.core.sequence import Sequence, Status
from quire_server.core.shared_prefill import Leaders, is_following
from quire_server.core.spec_decode import DraftPlan, Speculator, num_accepted
from quire_server.core.stats import SchedulerStats, SpeculationStats
from quire_server.core.step import (
    UNSATISFIABLE,
    Copies,
    StartedRow,
    Step,
    StepEvents,
    StepResult,
    TokenEvent,
    failure_event,
)

__all__ = ["InFlightStep", "Scheduler", "SchedulerConfig", "SchedulerStats", "StepPlan"]

_MAX_WAITING_FOR_DISK = 4  # sequences; each looks up its prefix again in every step
_UNKNOWN_TOKEN = (
    -1
)  # placeholder for a token that is still being computed; never leaves ``_assume_committed``


@dataclass(slots=True)
class StepPlan:
    """The sequences that a step computes, and what the runner has to apply to its rows before."""

    decodes: list[Sequence] = field(default_factory=list)
    new_decodes: list[Sequence] = field(default_factory=list)  # start in this step and lack one token
    drafts: list[DraftPlan] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with the number of tokens
    started: list[StartedRow] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)  # (row, block id)
    slot: int = 0
    admission_floor: int = 0  # nothing is admitted when no more is left of the token budget
    leaders: Leaders | None = None  # of the step's sequences, once they are looked for

    def in_order(self) -> list[Sequence]:
        """Every sequence, in the order of the step's rows."""
        drafted = [draft.sequence for draft in self.drafts]
        return self.decodes + drafted + [sequence for sequence, _ in self.chunks]


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step that was handed to the runner and is not committed yet.

    The first ``num_continuing`` of ``sequences`` (in the step's order) are decodes that ran before.
    """

    step: Step
    sequences: list[Sequence]
    num_continuing: int
    slot: int = 0
    has_finished_rows: bool = False  # a sequence finished or was aborted since: its result is to be dropped


class Scheduler:
    """``schedule`` may be ahead of ``commit``: by one step, or in a pipeline by one for each further stage.
    ``add`` and ``abort`` are allowed at any time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = KVCacheManager(config, clock)
        self._queue = RequestQueue(config, self.kv, eos_token_ids)
        self._speculator = Speculator(config.speculation, clock) if config.speculation else None
        self._in_flight: list[InFlightStep] = []  # the oldest one first
        self._slot = 0  # of the last step
        self._failures: list[TokenEvent] = []  # returned by the next commit
        self._exclusive: Sequence | None = None  # shares no step with other sequences
        self._clock = clock
        self._low_priority = LowPriorityBudget(config.low_priority_budget)
        self._num_steps = 0
        self._batch_is_closed = False  # static batching: the batch has started, nothing joins it

    # ---------------------------------------------------------------- state

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._queue.running.sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row: new ones, and preempted ones."""
        return len(self._queue.sequences) - len(self._queue.running.sequences)

    @property
    def growth_blocks(self) -> int:
        """KV blocks that running sequences are expected to need beside those they hold."""
        return self._queue.growth_blocks

    def expected_waiting_blocks(self, deferred: Iterable[Request]) -> int:
        """KV blocks that waiting sequences are expected to need, and requests that are not added yet."""
        return self._queue.waiting_blocks + sum(map(self._queue.blocks_of, deferred))

    @property
    def kv_utilization(self) -> float:
        """Share of blocks in use; cached ones count as free."""
        return self.kv.utilization

    @property
    def num_unaccounted_blocks(self) -> int:
        """KV blocks that are neither free nor in a block table: more than 0 is a leak. O(blocks in use)."""
        return self.kv.num_unaccounted(self._queue.running.sequences)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to commit."""
        return bool(self._queue.sequences or self._failures or self._in_flight or self.kv.has_staged_copies)

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start."""
        speculation = self._speculator.stats() if self._speculator is not None else SpeculationStats()
        return SchedulerStats(self._queue.preemptions, speculation)

    def check(self) -> None:
        """Raise AssertionError when the accounting of blocks or rows is inconsistent."""
        self.kv.check(self._queue.sequences.values())
        self._queue.running.check()

    # ---------------------------------------------------------------- requests

    def add(
        self,
        request: Request,
        *,
        is_exclusive: bool = False,
        num_fetched_tokens: int = 0,
        adapter: int = 0,
        adapter_key: str = "",
    ) -> None:
        """Queue a request. One that can never fit gets an error event from the next commit.

        ``is_exclusive``: it shares no step with others, which keep their rows and wait: for the canary, whose
        logits the other rows of a batch could change in the last bits. There is one such request at a time,
        and its priority has to be the highest. ``num_fetched_tokens``: of its prompt, computed by another
        server; they do not count as cached. ``adapter``: the number of the LoRA adapter that computes it,
        ``adapter_key`` what separates its KV blocks from those of others.
        """
        if request.request_id in self._queue.sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if reason := rejection_reason(request, self.config):
            self._failures.append(failure_event(request.request_id, reason))
            return
        self._queue.add(request, adapter, adapter_key)
        sequence = self._queue.sequences[request.request_id]
        sequence.num_fetched_tokens = num_fetched_tokens
        if is_exclusive:
            self._exclusive = sequence
        else:
            self._low_priority.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request without an event. An unknown id is fine: the request may have just finished."""
        self._failures = [event for event in self._failures if event.request_id != request_id]
        if (sequence := self._queue.sequences.get(request_id)) is not None:
            self._mark_in_flight()
            self._queue.finish(sequence)

    def finish(self, request_id: str) -> None:
        """Drop a request whose answer is complete: the API process found a stop string in its text."""
        if (sequence := self._queue.sequences.get(request_id)) is not None:
            self._queue.learn_output_length(sequence)
        self.abort(request_id)

    @property
    def adapters(self) -> AdapterSlots:
        """Which adapters are on the device."""
        return self._queue.adapters

    # ---------------------------------------------------------------- transfers

    @property
    def num_scheduled(self) -> int:
        """Steps that were scheduled since the start."""
        return self._num_steps

    @property
    def num_committed(self) -> int:
        """Of these, the first ones whose result is here."""
        return self._num_steps - len(self._in_flight)

    def hold_prefix(self, tokens: tuple[int, ...], salt: str) -> PrefixBlocks | None:
        """The blocks of a prefix that is cached already; None while sequences wait for blocks, which
        transfers must not keep from them for ever.
        """
        return None if self._queue.is_blocked else self.kv.hold(tokens, salt)

    def reserve_prefix(self, tokens: tuple[int, ...], salt: str) -> PrefixBlocks | None:
        """Blocks for a prefix that another server has computed; None while sequences wait for blocks. Steps
        that are in flight now may still write to them, for requests that were aborted.
        """
        return None if self._queue.is_blocked else self.kv.reserve(tokens, salt)

    def stage_prefix(self, held: PrefixBlocks, slots: Tokens[int]) -> int:
        """Copy the blocks of a prefix to slots on the host. They are there when so many steps are
        committed.
        """
        self.kv.stage(held, slots)
        return self._num_steps + 1

    def unstage_prefix(self, reserved: PrefixBlocks) -> int:
        """Copy what was read to slots on the host to the reserved blocks. It is there when so many steps are
        committed.
        """
        self.kv.unstage(reserved)
        return self._num_steps + 1

    def release_prefix(self, blocks: PrefixBlocks) -> None:
        """The blocks of a prefix are no longer read by or from another server."""
        self.kv.release_transferred(blocks)
        self._queue.is_blocked = False

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do. A step without rows only carries failures to
        commit, or waits for KV blocks from the disk.

        While a step is in flight: the one after it, or None where that depends on the missing result.
        """
        if self._in_flight:
            return self._schedule_ahead()
        if not self.has_work:
            return None
        queue = self._queue
        for victim in self._priority_victims():
            queue.preempt(victim)
        if (step := self._schedule_exclusive()) is not None:
            return step
        if self.config.num_slots > 1:
            return self._schedule_slots()
        num_preemptions = queue.preemptions
        plan = StepPlan()
        prompts = self._schedule_decodes(queue.running.sequences, plan)
        admits = queue.preemptions == num_preemptions
        if not (admits or plan.decodes or prompts):
            return self.schedule()  # every running sequence was preempted or failed: there is room now
        return self._complete_step(plan, prompts, admits=admits, may_be_empty=True)

    def _schedule_exclusive(self) -> Step | None:
        """The step of the exclusive sequence; None without one, or while it finds no room."""
        exclusive = self._find_exclusive()
        if exclusive is None:
            return None
        plan = StepPlan()
        is_running = exclusive.status is Status.RUNNING
        prompts = self._schedule_decodes([exclusive] if is_running else [], plan)
        return self._complete_step(plan, prompts, admits=not is_running, may_be_empty=False)

    def _find_exclusive(self) -> Sequence | None:
        if self._exclusive is not None and self._exclusive.status is Status.FINISHED:
            self._exclusive = None
        return self._exclusive

    def _schedule_ahead(self) -> Step | None:
        """Async scheduling: the step after those in flight. Preempts nothing, so that the result of a step in
        flight finds the rows and blocks of its sequences unchanged.
        """
        num_slots = self.config.num_slots
        if len(self._in_flight) >= max(2, num_slots) or not self.config.allows_async_scheduling:
            return None
        if self._priority_victims() or self._find_exclusive() is not None:
            return None
        if num_slots > 1:
            return self._schedule_slots()
        with _assume_committed(self._in_flight[0]):
            running = _unfinished(self._queue.running.sequences)
            if _num_blocks_to_append(running) > self.kv.num_free:
                return None
            plan = StepPlan()
            prompts = self._schedule_decodes(running, plan)
            return self._complete_step(plan, prompts, admits=True, may_be_empty=False)

    def _schedule_slots(self) -> Step | None:
        """The step of a slot whose last step is committed. Preempts only while no step is in flight."""
        running = self._queue.running.sequences
        loads = self._slot_loads()
        for slot in pipeline.candidates(loads, self._slot):
            own = [sequence for sequence in running if sequence.slot == slot]
            for sequence, target in zip(
                reversed(list(filter(_lacks_one_token, own))), pipeline.moves(loads, slot), strict=False
            ):
                own.remove(sequence)
                sequence.slot = target
            if self._in_flight and _num_blocks_to_append(own) > self.kv.num_free:
                return None
            num_preemptions = self._queue.preemptions
            limit = pipeline.admission_limit(loads, slot)
            plan = StepPlan(slot=slot, admission_floor=max(0, self.config.token_budget - limit - 1))
            prompts = self._schedule_decodes(own, plan)
            admits = self._queue.preemptions == num_preemptions
            step = self._complete_step(plan, prompts, admits=admits, may_be_empty=False)
            if step is not None:
                return step
        if self._in_flight:
            return None
        return self._complete_step(StepPlan(), [], admits=True, may_be_empty=True)

    def _slot_loads(self) -> list[SlotLoad]:
        count = self.config.num_slots
        decodes, tokens = [0] * count, [0] * count
        for sequence in self._queue.running.sequences:
            decodes[sequence.slot] += (is_decode := _lacks_one_token(sequence))
            tokens[sequence.slot] += 1 if is_decode else min(_num_missing(sequence), self.config.token_budget)
        busy = {in_flight.slot for in_flight in self._in_flight}
        return [SlotLoad(*load, slot in busy) for slot, load in enumerate(zip(decodes, tokens, strict=True))]

    def _priority_victims(self) -> list[Sequence]:
        """Running sequences to preempt for the first waiting one."""
        queue = self._queue
        first = queue.waiting.first()
        if first is None or queue.is_blocked or queue.waits_for_slot(first) or is_following(first):
            return []
        return preemption.victims(first, queue.running, self.kv, self.config)

    def _schedule_decodes(self, running: list[Sequence], plan: StepPlan) -> list[Sequence]:
        """Plan one token for each sequence that lacks one, with a KV block where it needs one; returns the
        sequences whose prompt is not computed yet.
        """
        decodes, new_blocks, prompts = plan.decodes, plan.new_blocks, list[Sequence]()
        budget = self.config.token_budget
        is_tight = len(running) > budget
        for sequence in running:  # preemption in _append_block takes sequences from its end
            if sequence.status is not Status.RUNNING:
                break
            num_computed = sequence.num_computed
            if num_computed + 1 < len(sequence.tokens):
                prompts.append(sequence)
                continue
            if is_tight and len(decodes) == budget:
                break
            if num_computed == sequence.capacity:
                block_id = self._append_block(sequence)
                if block_id is None:
                    break  # it was the last one, and was preempted itself
                new_blocks.append((sequence.row, block_id))
            decodes.append(sequence)
        return [sequence for sequence in prompts if sequence.status is Status.RUNNING]

    def _append_block(self, sequence: Sequence) -> int | None:
        """A block for the next token, if need be by preempting later sequences; None when the sequence itself
        was preempted or has failed.
        """
        running = self._queue.running.sequences
        while (block_id := self.kv.append_block(sequence)) is None:
            victim = running[-1]
            if victim is sequence and len(running) == 1 and not self.kv.has_transfers:
                if self.kv.release_pins():
                    continue
                self._queue.preemptions += 1
                self._fail_for_lack_of_blocks(sequence, len(sequence.block_ids) + 1)
                return None
            self._queue.preempt(victim)
            if victim is sequence:
                return None
        return block_id

    def _fail_for_lack_of_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        """End a request that needs more blocks than the whole cache has."""
        reason = too_long_reason(num_blocks, self.config)
        self._failures.append(failure_event(sequence.request.request_id, reason))
        self._queue.finish(sequence)

    def _complete_step(
        self, plan: StepPlan, prompts: list[Sequence], *, admits: bool, may_be_empty: bool
    ) -> Step | None:
        """Spend the rest of the budget, and make the step. None instead of a step without rows, unless it
        ``may_be_empty``.
        """
        budget = self._schedule_prompts(plan, prompts, admits=admits)
        if self._speculator is not None:
            plan.drafts = self._speculator.draft(plan.decodes, budget, self.kv, plan.new_blocks)
        queue, num_continuing = self._queue, len(plan.decodes)
        plan.decodes += plan.new_decodes
        sequences = plan.in_order()
        if not (sequences or may_be_empty):
            return None
        self._num_steps += 1
        if self._speculator is not None:
            self._speculator.begin_step(len(sequences), len(plan.drafts), has_prompts=bool(plan.chunks))
        loads = queue.adapters.take_loads()
        step = _build_step(self._num_steps, plan, sequences, self.kv.take_copies(), loads)
        self._in_flight.append(InFlightStep(step, sequences, num_continuing, plan.slot))
        self._slot = plan.slot
        return step

    # ---------------------------------------------------------------- admission

    def _schedule_prompts(self, plan: StepPlan, prompts: list[Sequence], *, admits: bool) -> int:
        """Chunked prefill of running prompts, in their order, and admission of waiting sequences; returns the
        rest of the budget.
        """
        budget = self.config.token_budget - len(plan.decodes)
        self._low_priority.begin_step(self._clock())
        for sequence in prompts:
            if admits and self._goes_before(self._queue.waiting.first(), sequence):
                budget = self._admit(budget, plan, sequence)
            if budget == 0:
                break
            if num_tokens := self._low_priority.take(sequence, min(budget, _num_missing(sequence))):
                plan.chunks.append((sequence, num_tokens))
                budget -= num_tokens
        return self._admit(budget, plan, None) if admits else budget

    def _admit(self, budget: int, plan: StepPlan, before: Sequence | None) -> int:
        """Start waiting sequences in their order while budget, rows and blocks last; with ``before``, only
        those that go before that running one. A sequence is overtaken only while it waits for blocks of its
        prefix: from the disk, or from a running sequence that computes them.
        """
        queue, running = self._queue, self._queue.running
        deferred: list[Sequence] = []
        self._batch_is_closed &= bool(running.sequences)
        while budget > plan.admission_floor and not (queue.is_blocked or self._batch_is_closed):
            sequence = queue.waiting.first()
            if sequence is None or running.num_free_rows <= len(deferred):
                break
            if before is not None and not self._goes_before(sequence, before):
                break
            if queue.park(sequence):
                continue
            if sequence is self._exclusive and (plan.decodes or plan.new_decodes or plan.chunks):
                break
            if self._low_priority.is_spent_for(sequence):
                break
            if (match := self._match(sequence, plan)) is None:
                # A row and blocks are reserved for it.
                if not self._may_defer(sequence, deferred):
                    break
                queue.waiting.pop()
                deferred.append(sequence)
                continue
            num_missing = len(sequence.tokens) - match.num_cached
            has_other_rows = bool(plan.chunks or plan.new_decodes)
            if num_missing > budget and not self._may_exceed(has_other_rows=has_other_rows):
                budget = 0
                break
            is_alone = not (running.sequences or deferred or self.kv.has_transfers)
            num_reserved = sum(map(self._num_blocks, deferred))
            if not self.kv.fits(match, is_alone=is_alone, num_reclaimed=-num_reserved):
                if is_alone:
                    # It was preempted with more tokens than the whole cache holds.
                    self._fail_for_lack_of_blocks(sequence, self._num_blocks(sequence))
                    continue
                queue.is_blocked = not deferred
                break
            budget = self._start(sequence, match, budget, plan)
            if sequence is self._exclusive:
                break
        for sequence in deferred:
            queue.waiting.push(sequence)
        # Static batching: sequences for which the budget did not suffice may join in the next step.
        self._batch_is_closed |= self.config.batching is Batching.STATIC and budget > 0
        return budget

    def _match(self, sequence: Sequence, plan: StepPlan) -> PrefixMatch | None:
        """The cached prefix of a waiting sequence; None where more of it is there after a later step."""
        if is_following(sequence):
            return None
        match = self.kv.match(sequence)
        if match is None or sequence is self._exclusive or sequence.num_swapped_tokens:
            return match
        if not self.config.shares_prompts:
            return match
        if plan.leaders is None:
            plan.leaders = Leaders(self._queue.running.sequences)
        return None if plan.leaders.follow(sequence, match.num_cached, self.config.block_size) else match

    def _may_defer(self, sequence: Sequence, deferred: list[Sequence]) -> bool:
        """Whether others may go before a sequence that waits for a part of its prefix."""
        if sequence.leader is not None:
            return True
        num_fetching = sum(one.leader is None for one in deferred)
        return self.config.batching is not Batching.STATIC and num_fetching < _MAX_WAITING_FOR_DISK

    def _start(self, sequence: Sequence, match: PrefixMatch, budget: int, plan: StepPlan) -> int:
        """Start a sequence that fits; returns the rest of the budget."""
        plan.started.append(self._queue.start(sequence, match))
        sequence.slot = plan.slot
        if plan.leaders is not None:
            plan.leaders.add(sequence)
        num_tokens = _num_missing(sequence)
        if not self.config.pools:
            num_tokens = self._low_priority.take(sequence, min(budget, num_tokens))
        return max(0, budget - self._plan_first_tokens(sequence, num_tokens, plan))

    def _may_exceed(self, *, has_other_rows: bool) -> bool:
        """Whether a prompt that is longer than the rest of the budget may start: in chunks, or alone."""
        return self.config.enable_chunked_prefill or (self.config.pools and not has_other_rows)

    def _plan_first_tokens(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
        """A sequence that starts is a decode when all but its last token is cached, else a prefill chunk."""
        if sequence.num_computed + 1 == len(sequence.tokens):
            plan.new_decodes.append(sequence)
        else:
            plan.chunks.append((sequence, num_tokens))
        return num_tokens

    def _goes_before(self, waiting: Sequence | None, running: Sequence) -> bool:
        return (
            waiting is not None
            and waiting.order < running.order
            and preemption.may_interrupt(waiting, self.config)
        )

    def _num_blocks(self, sequence: Sequence) -> int:
        """That it needs, but for those that it will share."""
        return -(-len(sequence.tokens) // self.config.block_size) - sequence.num_shared_blocks

    # ---------------------------------------------------------------- commit

    def commit(self, step: Step, result: StepResult) -> StepEvents:
        """Take in what the runner computed: append tokens, publish full blocks, finish requests."""
        in_flight = self._in_flight.pop(0)
        assert step.step_id == result.step_id == in_flight.step.step_id, (step.step_id, result.step_id)
        sequences, num_live = in_flight.sequences, len(self._queue.sequences)
        events, self._failures = self._failures, []
        unloaded = self.kv.apply_copy_outcome(result)
        is_irregular = unloaded or result.failures or in_flight.has_finished_rows
        num_plain = 0 if is_irregular else in_flight.num_continuing
        request_ids, token_ids = self._commit_decodes(sequences[:num_plain], result, events)
        tokens, drafts = iter(result.token_ids[num_plain:]), dict(result.drafts or step.drafts)
        for sequence, num_tokens, samples in zip(
            sequences[num_plain:], step.num_tokens[num_plain:], step.samples[num_plain:], strict=True
        ):
            row_drafts = drafts.get(sequence.row, ())
            sampled = list(islice(tokens, 1 + len(row_drafts) if samples else 0))
            if sequence.status is not Status.RUNNING:
                continue  # it finished while the step ran
            if unloaded and not unloaded.isdisjoint(sequence.block_ids):
                self._queue.restart(sequence)
                continue
            if result.failures and (reason := result.failures.get(sequence.row)) is not None:
                events.append(self._fail(sequence, reason))
                continue
            events += _prompt_logprob_events(sequence, result)
            if samples:
                events.append(
                    self._commit_samples(sequence, num_tokens - samples, row_drafts, sampled, result)
                )
            else:
                sequence.num_computed += num_tokens
                self._publish(sequence)
        if len(self._queue.sequences) < num_live:
            self._mark_in_flight()
        if self._speculator is not None:
            self._speculator.end_step(result)
        return StepEvents(request_ids, token_ids, events)

    def _commit_decodes(
        self, decodes: list[Sequence], result: StepResult, events: list[TokenEvent]
    ) -> tuple[list[str], list[int]]:
        """One more token for each: columns of (request id, token). Sequences that finish or want logprobs get
        an event of their own in ``events`` instead.
        """
        token_ids, with_event = result.token_ids[: len(decodes)], set[Sequence]()
        for sequence in _append_tokens(decodes, token_ids):
            self._publish(sequence)
            reason = sequence.finish_reason()
            if reason is not None or sequence.request.sampling.logprobs is not None:
                events.append(self._token_event(sequence, 1, reason, result))
                with_event.add(sequence)
        if not with_event:
            return [sequence.request.request_id for sequence in decodes], list(token_ids)
        plain = [sequence for sequence in decodes if sequence not in with_event]
        return [s.request.request_id for s in plain], [s.tokens[-1] for s in plain]

    def _commit_samples(
        self,
        sequence: Sequence,
        num_before: int,
        drafts: tuple[int, ...],
        sampled: list[int],
        result: StepResult,
    ) -> TokenEvent:
        """Append the accepted drafts and the token that the model sampled after them."""
        accepted = num_accepted(drafts, sampled)
        count, reason = sequence.append_tokens(sampled[: accepted + 1])
        sequence.num_computed += num_before + count
        self._publish(sequence)
        if drafts and self._speculator is not None:
            self._speculator.learn(sequence, len(drafts), accepted)
        return self._token_event(sequence, count, reason, result)

    def _fail(self, sequence: Sequence, reason: str) -> TokenEvent:
        """End a request whose row failed. What was computed for it is not trusted, unless the request's own
        constraints are the reason.
        """
        if reason not in UNSATISFIABLE:
            self.kv.invalidate(sequence)
        self._queue.finish(sequence)
        return failure_event(sequence.request.request_id, reason)

    def _token_event(
        self, sequence: Sequence, num_tokens: int, reason: FinishReason | None, result: StepResult
    ) -> TokenEvent:
        """The event of a sequence's newest tokens; finishes the request where there is a reason."""
        logprobs = result.logprobs.get(sequence.row, ())[:num_tokens] if result.logprobs else ()
        event = TokenEvent(
            sequence.request.request_id,
            tuple(sequence.tokens[-num_tokens:]),
            logprobs or None,
            reason,
            None,
            sequence.num_cached_tokens or 0,
            timing=sequence.timing(is_last=reason is not None),
            pooled=result.pooled.get(sequence.row, b""),
        )
        if reason is not None:
            self._queue.learn_output_length(sequence)
            self._queue.finish(sequence)
        return event

    def _publish(self, sequence: Sequence) -> None:
        if sequence.num_computed >= (sequence.num_published + 1) * self.config.block_size:
            self.kv.publish(sequence)
            sequence.update_expected_total()
        sequence.update_check_from(self.config.block_size)

    def _mark_in_flight(self) -> None:
        """A sequence finished: steps in flight may still compute a row of it."""
        for in_flight in self._in_flight:
            in_flight.has_finished_rows = True


def _build_step(
    step_id: int,
    plan: StepPlan,
    in_order: list[Sequence],
    copies: Copies | None,
    adapter_loads: tuple[tuple[int, int], ...],
) -> Step:
    """The step of a plan: decodes first, then rows with drafts, then prefill chunks."""
    ones, chunks = (1,) * len(plan.decodes), plan.chunks
    drafted = tuple([1 + draft.num_tokens for draft in plan.drafts])
    return Step(
        step_id=step_id,
        started=tuple(plan.started),
        new_blocks=tuple(plan.new_blocks),
        rows=tuple([sequence.row for sequence in in_order]),
        starts=tuple([sequence.num_computed for sequence in in_order]),
        num_tokens=ones + drafted + tuple([n for _, n in chunks]),
        samples=ones + drafted + tuple([int(s.num_computed + n == len(s.tokens)) for s, n in chunks]),
        drafts=tuple([(draft.sequence.row, draft.tokens) for draft in plan.drafts if draft.tokens]),
        draft_requests=tuple(
            [(draft.sequence.row, draft.num_tokens) for draft in plan.drafts if not draft.tokens]
        ),
        copies=copies,
        adapter_loads=adapter_loads,
    )


@contextmanager
def _assume_committed(in_flight: InFlightStep) -> Iterator[None]:
    """Inside the block, sequences look as if the step in flight were committed, with placeholders for the
    tokens that it samples. Which tokens these are matters to few decisions.
    """
    computing = [
        (sequence, num_tokens, samples)
        for sequence, num_tokens, samples in zip(
            in_flight.sequences, in_flight.step.num_tokens, in_flight.step.samples, strict=True
        )
        if sequence.status is Status.RUNNING
    ]
    for sequence, num_tokens, samples in computing:
        sequence.num_computed += num_tokens
        if samples:
            sequence.tokens.append(_UNKNOWN_TOKEN)
    try:
        yield
    finally:
        for sequence, num_tokens, samples in computing:
            sequence.num_computed -= num_tokens
            if samples:
                sequence.tokens.pop()


def _num_missing(sequence: Sequence) -> int:
    """Tokens of a sequence that are not computed."""
    return len(sequence.tokens) - sequence.num_computed


def _lacks_one_token(sequence: Sequence) -> bool:
    """Whether the next step of a running sequence is a decode."""
    return sequence.num_computed + 1 >= len(sequence.tokens)


def _unfinished(sequences: list[Sequence]) -> list[Sequence]:
    """Sequences that have not reached their maximum length."""
    return [sequence for sequence in sequences if len(sequence.tokens) < sequence.max_total]


def _num_blocks_to_append(sequences: list[Sequence]) -> int:
    """How many decodes need a new block for their token."""
    return sum(
        sequence.num_computed == sequence.capacity and sequence.num_computed + 1 == len(sequence.tokens)
        for sequence in sequences
    )


def _append_tokens(decodes: list[Sequence], token_ids: Tokens[int]) -> list[Sequence]:
    """Append one token to each sequence; returns those that may have filled a block or finished. This is the
    cost of a step beside the model, so it does nothing else per row.
    """
    to_check: list[Sequence] = []
    for sequence, token in zip(decodes, token_ids, strict=True):
        sequence.tokens.append(token)
        sequence.num_computed = num_computed = sequence.num_computed + 1
        if num_computed >= sequence.check_from or token in sequence.stop_ids:
            to_check.append(sequence)
    return to_check


def _prompt_logprob_events(sequence: Sequence, result: StepResult) -> list[TokenEvent]:
    """An event with the prompt logprobs that were not sent before; after a preemption a step has some
    again.
    """
    first_new = sequence.num_prompt_logprobs_sent - sequence.num_computed
    logprobs = result.prompt_logprobs.get(sequence.row, ())[first_new:]
    sequence.num_prompt_logprobs_sent += len(logprobs)
    return [TokenEvent(sequence.request.request_id, (), prompt_logprobs=logprobs)] if logprobs else []
