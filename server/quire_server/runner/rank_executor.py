"""Forward passes on several ranks: rank 0 decides what all of them compute, and samples.

``LeaderExecutor`` belongs to rank 0's ModelRunner; ``FollowerRunner`` is all that another rank runs. Both
keep the exchanges of a pass complete when memory runs out on one rank, so that all repeat the pass alike.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from quire_server.core.copy_outcomes import CopyOutcomes
from quire_server.core.cuda_graph_shapes import Shape
from quire_server.core.rank_step import (
    NO_WORK,
    STEP_MASK,
    AdapterOrder,
    AdapterReport,
    EchoStatus,
    RankLimits,
    RankStep,
    Work,
)
from quire_server.core.step import CopyOutcome, Step, StepResult
from quire_server.layers.parallel import STAGE_DEADLINE, CollectiveError
from quire_server.models.decoder import Decoder
from quire_server.runner import exchanges, oom_retry, sampler
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu import memory_profile
from quire_server.runner.gpu.device import Device, translate_device_errors
from quire_server.runner.gpu.executor import ForwardOutput, GpuExecutor
from quire_server.runner.gpu.warm_up import prepare
from quire_server.runner.host_executor import HostExecutor
from quire_server.runner.input_batch import InputBatch, SampledPositions
from quire_server.runner.kv_cache import DirtyBlocks
from quire_server.runner.kv_offload import Copied
from quire_server.runner.loader import LoadedModel, load_model
from quire_server.runner.rank_adapters import FollowerAdapters
from quire_server.runner.ranks import Followers, Membership, PassOutcome

Executor = HostExecutor | GpuExecutor


class _Rank:
    """One rank's part in a pass."""

    def __init__(
        self, model: Decoder, executor: Executor, input_batch: InputBatch, ranks: Membership
    ) -> None:
        self._model, self._executor, self._input_batch = model, executor, input_batch
        self._communicator = ranks.communicator

    def readings(self) -> tuple[float, float, int]:
        """For ``work_since``."""
        return time.perf_counter(), self._communicator.waited, self._communicator.bytes

    def work_since(self, readings: tuple[float, float, int]) -> Work:
        """What this rank has done since these readings. On a GPU waits for other ranks are part of it."""
        seconds, waited, given = (now - then for now, then in zip(self.readings(), readings, strict=True))
        return Work(max(1, round(1e6 * (seconds - waited))), round(given))

    def compute(
        self, step: Step, layout: StepLayout, graph: Shape | None, *, only_largest: bool
    ) -> Callable[[], ForwardOutput] | None:
        """As the executor's. None: this rank ran out of memory, and took part in the exchanges that were
        left.
        """
        before = self._communicator.calls
        try:
            return self._executor.launch(step, layout, graph, only_largest=only_largest)
        except (RuntimeError, MemoryError) as error:
            if not oom_retry.is_out_of_memory(error):
                raise
        # Outside the except block: until it ends, the traceback keeps the failed pass's tensors alive.
        made = self._communicator.calls - before
        plan = exchanges.planned(
            step, layout, self._input_batch, self._model, graph, only_largest=only_largest
        )
        self._executor.take_part(graph, self._communicator, plan, made)
        return None

    def leave(self) -> None:
        """After a failed exchange: ranks of other stages, which wait longer for this one than it waited for
        the ranks of its own, find that it has gone.
        """
        self._communicator.abort()

    def receive_only(
        self, step: Step, layout: StepLayout, *, only_largest: bool
    ) -> Callable[[], ForwardOutput]:
        """What the last of several stages sends to rank 0, which ran out of memory before."""
        finish = self._executor.output(step, layout, only_largest=only_largest)
        return lambda: finish(None)


@dataclass(eq=False)
class _Pass:
    """A pass that rank 0 has begun. ``finish``: waits for the output; None where rank 0 has ended."""

    samples: bool
    finish: Callable[[], ForwardOutput] | None = None
    is_out_of_memory: bool = False
    is_done: bool = False
    output: ForwardOutput | None = None  # None when it is done: a rank had no memory
    lost: CollectiveError | None = None
    work: Work = NO_WORK


class LeaderExecutor:
    """Rank 0: sends each pass to the other ranks, computes its own part, and waits for theirs."""

    def __init__(
        self,
        loaded: LoadedModel,
        input_batch: InputBatch,
        executor: Executor,
        ranks: Membership,
        followers: Followers,
    ) -> None:
        self._executor, self._followers, self._input_batch = executor, followers, input_batch
        self._rank = _Rank(loaded.model, executor, input_batch, ranks)
        self.is_pipelined = ranks.topology.pipeline > 1
        self._passes: deque[_Pass] = deque()  # in flight
        self._unsent: set[int] = set()  # steps of which the other ranks have not applied what they change
        self._sampled_steps: list[int] = []
        self._sampled: list[int] = []
        self._nan_rows: set[int] = set()
        self._copied: list[CopyOutcome] = []  # of the other ranks in this step
        self.adapter_orders: deque[AdapterOrder] = deque()
        self._reports: list[tuple[int, AdapterReport]] = []
        self._has_sent = False  # anything since the last exchange of orders and reports
        self._copy_outcomes = CopyOutcomes(ranks.topology.size)

    def begin(self, step: Step) -> None:
        """A new step begins; its passes follow, one or, where memory runs out, several."""
        self._unsent.add(step.step_id)

    def sampled(self, step_id: int, tokens: Sequence[int]) -> None:
        """The tokens at the sampled positions of a step, which the next message has."""
        self._sampled_steps.append(step_id & STEP_MASK)
        self._sampled += tokens

    def mark_dirty(self, rows: set[int]) -> None:
        """Rows whose logits are not finite, which the next message has."""
        self._nan_rows |= rows

    def launch(self, step: Step, layout: StepLayout) -> Callable[[], ForwardOutput]:
        """Begin a pass; the function waits for its output, and raises MemoryError if any rank ran out of
        memory. With one stage the pass is done before. Passes end in the order in which they begin.
        """
        graph = self._executor.graph_for(step, layout)
        only_largest = sampler.needs_only_largest(
            self._input_batch, layout.sampled_rows, layout.sampled_lengths
        )
        self._send(step, graph, only_largest=only_largest)
        begun = _Pass(samples=bool(layout.sampled_rows.size))
        self._passes.append(begun)
        readings = self._rank.readings()
        try:
            begun.finish = self._rank.compute(step, layout, graph, only_largest=only_largest)
        except CollectiveError as error:
            begun.lost = error
        else:
            begun.is_out_of_memory = begun.finish is None
            if begun.finish is None and self.is_pipelined:
                begun.finish = self._rank.receive_only(step, layout, only_largest=only_largest)
        begun.work = self._rank.work_since(readings)
        if self.is_pipelined:
            return lambda: self._wait(begun)
        output = self._wait(begun)
        return lambda: output

    def _wait(self, begun: _Pass) -> ForwardOutput:
        while not begun.is_done:
            self._end(self._passes.popleft())
        if begun.output is None:
            raise oom_retry.OutOfMemoryOnRankError("a rank has no memory for the pass")
        return begun.output

    def _end(self, begun: _Pass) -> None:
        """Take in the output of the oldest pass, and the echoes of it."""
        output, readings = None, self._rank.readings()
        try:
            if begun.finish is not None:
                output = begun.finish()
        except CollectiveError as error:
            begun.lost = error
        lost = begun.lost
        # Names the rank that was missing.
        work = begun.work.plus(self._rank.work_since(readings))
        outcome = self._followers.collect(is_lost=lost is not None, has_output=begun.samples, work=work)
        if lost is not None:
            raise lost
        self._take(outcome)
        begun.is_done = True
        if not (begun.is_out_of_memory or outcome.is_out_of_memory):
            begun.output = output

    def apply_only(self, step: Step) -> None:
        """Send a step that computes nothing to the other ranks."""
        self._send(step, None, only_largest=False)
        self._take(self._followers.collect())

    def exchange_adapters(self) -> list[tuple[int, AdapterReport]]:
        """As ``rank_adapters.OtherRanks``. While steps run they have the orders and the reports."""
        if not self._passes and (self.adapter_orders or not self._has_sent):
            self.apply_only(Step(0, (), (), (), (), (), ()))
        self._has_sent = False
        reports, self._reports = self._reports, []
        return reports

    def _take(self, outcome: PassOutcome) -> None:
        self._copied += outcome.copied
        self._reports += outcome.adapters

    def with_copied(self, result: StepResult, mine: CopyOutcome | None) -> StepResult:
        """The result of a step with what its copies came to on all ranks. ``mine``: on rank 0."""
        theirs, self._copied = self._copied, []
        copied = self._copy_outcomes.combine(theirs if mine is None else [mine, *theirs])
        return result if copied is None else replace(result, copied=copied)

    def _send(self, step: Step, graph: Shape | None, *, only_largest: bool) -> None:
        """What was applied already is not sent again with a repeated pass."""
        if step.step_id not in self._unsent:
            step = Step(step.step_id, (), (), step.rows, step.starts, step.num_tokens, step.samples)
        self._unsent.discard(step.step_id)
        nan_rows = tuple(sorted(self._nan_rows))
        steps, sampled = tuple(self._sampled_steps), self._sampled
        orders = tuple(self.adapter_orders.popleft() for _ in range(len(self.adapter_orders)))
        self._followers.send(RankStep(step, steps, sampled, nan_rows, graph, only_largest, orders))
        self._sampled_steps, self._sampled, self._nan_rows = [], [], set()
        self._has_sent = True


class _Expected(NamedTuple):
    """A step that may come next, with its layout."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    layout: StepLayout

    def is_this(self, step: Step) -> bool:
        """Whether it has come."""
        return step.rows == self.rows and step.starts == self.starts and step.has_only_decodes


class FollowerRunner:
    """A rank other than the first: executes the passes that rank 0 sends; samples and decides nothing."""

    def __init__(self, loaded: LoadedModel, options: RunnerConfig, ranks: Membership) -> None:
        self._input_batch = InputBatch(options.max_num_seqs, loaded.max_model_len, options.block_size)
        self._dirty_blocks = DirtyBlocks(self._input_batch, loaded.kv_caches)
        device, parts = loaded.device, (loaded.model, loaded.kv_caches, self._input_batch)
        own, batch = loaded.adapters, None
        if own is not None:
            batch = own.batch
        self._adapters = None if own is None else FollowerAdapters(own)
        if device is None:
            self._executor: Executor = HostExecutor(*parts, batch)
        else:
            self._executor = GpuExecutor(
                *parts, device, num_drafts=options.num_speculative_tokens, adapters=batch
            )
        self._captures = device is not None and memory_profile.uses_graphs(loaded.model, options)
        if device is not None:
            self._executor.can_replay = self._captures
        self._step_tokens = options.max_num_batched_tokens
        self._rank = _Rank(loaded.model, self._executor, self._input_batch, ranks)
        self._offload = loaded.offload_worker()
        self.work = NO_WORK  # of the last pass
        self._last: Step | None = None
        self._expected: _Expected | None = None
        self._sampled: dict[int, SampledPositions] = {}  # by step, of those whose tokens are not known yet
        self.limits = RankLimits(
            options.max_num_seqs,
            loaded.num_blocks,
            loaded.num_pool_slots,
            0 if loaded.disk is None else loaded.disk.num_slots,
            loaded.max_model_len,
            loaded.model.config.vocab_size,
            options.max_adapters,
        )

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: RunnerConfig,
        on_progress: Callable[[int, int], None],
        ranks: Membership,
        device: Device | None = None,
    ) -> "FollowerRunner":
        """Read this rank's part of the model. ``device``: the GPU that computes; None: this machine's CPU."""
        with translate_device_errors("while the model is loaded"):
            return cls(load_model(model_dir, options, on_progress, device, ranks), options, ranks)

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """As ``ModelRunner.capture``: all ranks compute the same steps, and capture the same shapes, in the
        same order.
        """
        if not isinstance(self._executor, GpuExecutor):
            return
        with translate_device_errors("while kernels are compiled and graphs captured"):
            prepare(self._executor, self._step_tokens, on_progress, has_graphs=self._captures)
            if self._offload is not None:
                self._offload.warm_up()

    @property
    def can_replay(self) -> bool:
        """Whether this rank has recordings of decode steps."""
        return self._executor.can_replay

    def prepare(self) -> None:
        """While rank 0 samples: prepare the step that most often follows decodes, the next token of each of
        their rows. Its message then only completes it.
        """
        if (last := self._last) is None or not (last.rows and last.has_only_decodes):
            return
        starts = tuple([start + 1 for start in last.starts])
        if max(starts) < self.limits.max_model_len:
            layout = StepLayout.of_decodes(np.array(last.rows, np.int64), np.array(starts, np.int64))
            self._executor.prepare(layout)
            self._expected = _Expected(last.rows, starts, layout)

    @torch.inference_mode()
    def execute(self, message: RankStep) -> tuple[EchoStatus, CopyOutcome | None]:
        """(how the pass ended, what copies came to on this rank)."""
        readings = self._rank.readings()
        with translate_device_errors():
            copied = self._begin(message)
            status = self._execute(message)
            if status is EchoStatus.DONE and not self._executor.finish(STAGE_DEADLINE):
                status = EchoStatus.LOST_PEER
            if copied is not None and status is not EchoStatus.LOST_PEER:
                copied.finish()
            self.work = self._rank.work_since(readings) if message.step.rows else NO_WORK
            return status, None if copied is None else copied.outcome

    def _begin(self, message: RankStep) -> Copied | None:
        """Apply what the step changes, and start its copies."""
        step = message.step
        self._write_sampled(message)
        self._dirty_blocks.add(message.nan_rows)
        self._input_batch.apply(step)
        self._executor.apply(step)
        if self._adapters is not None:
            self._adapters.obey(message.adapter_orders)
            self._adapters.load(step.adapter_loads)
        copied = self._offload.copy(step) if self._offload is not None else None
        self._dirty_blocks.zero_reused(step)
        return copied

    def _execute(self, message: RankStep) -> EchoStatus:
        step = message.step
        layout = self._layout_of(step)
        self._last, self._expected = step, None
        if not step.rows:
            return EchoStatus.DONE
        positions = self._input_batch.positions(layout.sampled_rows, layout.sampled_lengths)
        self._sampled[step.step_id & STEP_MASK] = positions
        if message.graph not in (None, self._executor.graph_for(step, layout)):
            raise ValueError(
                f"rank 0 replays a recording of the shape {message.graph}, which this rank lacks"
            )
        try:
            output = self._rank.compute(step, layout, message.graph, only_largest=message.only_largest)
        except CollectiveError:
            self._rank.leave()
            return EchoStatus.LOST_PEER
        return EchoStatus.DONE if output is not None else EchoStatus.OUT_OF_MEMORY

    def adapter_reports(self) -> tuple[AdapterReport, ...]:
        """The adapters that this rank has read since the last call, or could not."""
        return () if self._adapters is None else self._adapters.reports()

    def _layout_of(self, step: Step) -> StepLayout:
        expected = self._expected
        return expected.layout if expected is not None and expected.is_this(step) else StepLayout.of(step)

    def _write_sampled(self, message: RankStep) -> None:
        """Write the tokens of earlier steps. A step before them whose tokens did not come has failed."""
        tokens = np.array(message.sampled, np.int64)
        for step_id in message.sampled_steps:
            if step_id not in self._sampled:
                raise ValueError(f"tokens of step {step_id}, which is not in flight")
            while (oldest := next(iter(self._sampled))) != step_id:
                del self._sampled[oldest]
            positions = self._sampled.pop(step_id)
            count = len(positions.rows)
            if len(tokens) < count:
                raise ValueError(f"{len(tokens)} tokens for {count} sampled positions")
            positions.write(tokens[:count], self._input_batch)
            tokens = tokens[count:]
        if len(tokens):
            raise ValueError(f"{len(tokens)} tokens more than the steps sampled")
