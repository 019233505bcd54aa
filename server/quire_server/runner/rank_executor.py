"""Forward passes on several ranks: rank 0 decides what all of them compute, and samples.

``LeaderExecutor`` belongs to rank 0's ModelRunner; ``FollowerRunner`` is all that another rank runs. Both
keep the exchanges of a pass complete when memory runs out on one rank, so that all repeat the pass alike.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quire_server.core.copy_outcomes import CopyOutcomes
from quire_server.core.rank_step import EchoStatus, RankLimits, RankStep
from quire_server.core.step import CopyOutcome, Step
from quire_server.layers.parallel import CollectiveError
from quire_server.models.decoder import Decoder
from quire_server.runner import exchanges, oom_retry
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.config import RunnerConfig
from quire_server.runner.gpu.executor import ForwardOutput
from quire_server.runner.host_executor import HostExecutor
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.kv_cache import DirtyBlocks
from quire_server.runner.kv_offload import OffloadWorker
from quire_server.runner.loader import LoadedModel, load_model
from quire_server.runner.ranks import Followers, Membership


class OutOfMemoryOnRankError(MemoryError):
    """A rank had no memory for a pass; all ranks have ended it."""


class _Rank:
    """One rank's part in a pass."""

    def __init__(
        self, model: Decoder, host: HostExecutor, input_batch: InputBatch, ranks: Membership
    ) -> None:
        self._model, self._host, self._input_batch = model, host, input_batch
        self._communicator = ranks.communicator

    def compute(self, step: Step, layout: StepLayout, *, is_replay: bool) -> ForwardOutput | None:
        """None: this rank ran out of memory, and took part in the exchanges that were left."""
        before = self._communicator.calls
        try:
            return self._host.compute(step, layout, is_replay=is_replay)
        except (RuntimeError, MemoryError) as error:
            if not oom_retry.is_out_of_memory(error):
                raise
        # Outside the except block: until it ends, the traceback keeps the failed pass's tensors alive.
        made = self._communicator.calls - before
        plan = exchanges.planned(step, layout, self._input_batch, self._model.config, is_replay=is_replay)
        exchanges.take_part(self._communicator, plan[made:], self._model.embedding.dtype)
        return None


class LeaderExecutor:
    """Rank 0: sends each pass to the other ranks, computes its own part, and waits for theirs."""

    def __init__(
        self,
        loaded: LoadedModel,
        input_batch: InputBatch,
        host: HostExecutor,
        ranks: Membership,
        followers: Followers,
    ) -> None:
        self._host, self._followers = host, followers
        self._rank = _Rank(loaded.model, host, input_batch, ranks)
        self._is_sent = False  # the other ranks have applied what this step changes
        self._sampled: tuple[int, ...] = ()
        self._nan_rows: set[int] = set()
        self._copied: list[CopyOutcome] = []  # of the other ranks in this step
        self._copy_outcomes = CopyOutcomes(ranks.topology.tensor)

    def begin(self) -> None:
        """A new step begins."""
        self._is_sent = False

    def sampled(self, tokens: tuple[int, ...]) -> None:
        """The tokens at the sampled positions of the last pass, which the next message has."""
        self._sampled = tokens

    def mark_dirty(self, rows: set[int]) -> None:
        """Rows whose logits are not finite, which the next message has."""
        self._nan_rows |= rows

    def compute(self, step: Step, layout: StepLayout) -> ForwardOutput:
        """As HostExecutor's. Raises MemoryError if any rank ran out of memory."""
        is_replay = self._host.replays(step, layout)
        self._send(step, is_replay=is_replay)
        lost: CollectiveError | None = None
        output = None
        try:
            output = self._rank.compute(step, layout, is_replay=is_replay)
        except CollectiveError as error:
            lost = error
        outcome = self._followers.collect(is_lost=lost is not None)  # names the rank that was missing
        if lost is not None:
            raise lost
        self._copied += outcome.copied
        if output is None or outcome.is_out_of_memory:
            raise OutOfMemoryOnRankError("a rank has no memory for the pass")
        return output

    def apply_only(self, step: Step) -> None:
        """Send a step that computes nothing to the other ranks."""
        self._send(step, is_replay=False)
        self._copied += self._followers.collect().copied

    def all_copied(self, mine: CopyOutcome | None) -> CopyOutcome | None:
        """What the step's copies came to on all ranks, after its last pass. ``mine``: on rank 0."""
        theirs, self._copied = self._copied, []
        return self._copy_outcomes.combine(theirs if mine is None else [mine, *theirs])

    def _send(self, step: Step, *, is_replay: bool) -> None:
        """What was applied already is not sent again with a repeated pass."""
        if self._is_sent:
            step = Step(step.step_id, (), (), step.rows, step.starts, step.num_tokens, step.samples)
        self._is_sent = True
        self._followers.send(RankStep(step, self._sampled, tuple(sorted(self._nan_rows)), is_replay))
        self._sampled, self._nan_rows = (), set()


class FollowerRunner:
    """A rank other than the first: executes the passes that rank 0 sends; samples and decides nothing."""

    def __init__(self, loaded: LoadedModel, options: RunnerConfig, ranks: Membership) -> None:
        self._input_batch = InputBatch(options.max_num_seqs, loaded.max_model_len, options.block_size)
        self._dirty_blocks = DirtyBlocks(self._input_batch, loaded.kv_caches)
        self._host = HostExecutor(loaded.model, loaded.kv_caches, self._input_batch)
        self._rank = _Rank(loaded.model, self._host, self._input_batch, ranks)
        slots = loaded.num_host_slots
        self._offload = OffloadWorker(loaded.kv_caches, slots, loaded.disk) if slots else None
        self._positions: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self.limits = RankLimits(
            options.max_num_seqs,
            loaded.num_blocks,
            slots,
            0 if loaded.disk is None else loaded.disk.num_slots,
            loaded.max_model_len,
            loaded.model.config.vocab_size,
        )

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: RunnerConfig,
        on_progress: Callable[[int, int], None],
        ranks: Membership,
    ) -> "FollowerRunner":
        """Read this rank's part of the model."""
        return cls(load_model(model_dir, options, on_progress, None, ranks), options, ranks)

    @property
    def can_replay(self) -> bool:
        """Whether this rank has a recorded decode."""
        return self._host.can_replay

    @torch.inference_mode()
    def execute(self, message: RankStep) -> tuple[EchoStatus, CopyOutcome | None]:
        """(how the pass ended, what copies came to on this rank)."""
        step, (rows, lengths) = message.step, self._positions
        if len(message.sampled) not in (0, len(rows)):
            raise ValueError(f"{len(message.sampled)} tokens for {len(rows)} sampled positions")
        if message.sampled:
            self._input_batch.write(rows, lengths, np.array(message.sampled, np.int64))
        self._dirty_blocks.add(message.nan_rows)
        self._input_batch.apply(step)
        copied = self._offload.copy(step) if self._offload is not None else None
        self._dirty_blocks.zero_reused(step)
        layout = StepLayout.of(step)
        self._positions = layout.sampled_rows, layout.sampled_lengths
        if not step.rows:
            return EchoStatus.DONE, copied
        try:
            output = self._rank.compute(step, layout, is_replay=message.is_recorded)
        except CollectiveError:
            return EchoStatus.LOST_PEER, copied
        return EchoStatus.DONE if output is not None else EchoStatus.OUT_OF_MEMORY, copied
