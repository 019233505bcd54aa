"""Speculative decoding with a draft model: a smaller model with the same tokenizer proposes tokens, which the
model then verifies.

Its keys and values are in caches of its own under the model's block ids, so it needs no block accounting. A
block computed once is reused as long as the block id keeps its content; otherwise (after a preemption, after
a load from an offload tier) it is recomputed, and only when a row wants drafts, so that rows without drafts
cost nothing. Drafts are sampled with the model's parameters and noise (ADR 0013). The scheduler decides how
many drafts a row gets.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from quire_server.core.step import Step
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder, oom_retry
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.executor import ForwardOutput, GpuExecutor
from quire_server.runner.input_batch import InputBatch
from quire_server.runner.recorded_decode import RecordedDecode

#: (output of a pass, rows [S], context lengths [S]) -> token ids, which it also writes to the input batch.
SampleFn = Callable[[ForwardOutput, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]

logger = logging.getLogger(__name__)

_USUAL_TOKENS = 2  # uncomputed after a step with drafts: the last draft and the model's token


class _Chunk(NamedTuple):
    row: int
    start: int
    num_tokens: int
    is_sampled: bool


class DraftModel:
    """Proposes tokens for the rows of the input batch that it shares with the model."""

    def __init__(
        self,
        model: Decoder,
        kv_caches: tuple[Tensor, ...],
        input_batch: InputBatch,
        *,
        vocab_size: int,
        step_tokens: int,
        device: GpuExecutor | None = None,
    ) -> None:
        """``vocab_size`` is the model's; ``step_tokens``: most tokens of context that one step computes;
        ``device``: the draft model's executor on a GPU.
        """
        self._device = device
        self._model = model
        self._kv_caches = kv_caches
        self._input_batch = input_batch
        self._recorded_decode = RecordedDecode.of(model, kv_caches, *input_batch.block_table.shape)
        self._vocab_size = vocab_size
        self._step_tokens = step_tokens
        self._num_computed = np.zeros(input_batch.num_blocks.shape[0], np.int64)  # leading tokens of each row
        self._is_computed = np.zeros(kv_caches[0].shape[1], bool)  # blocks with valid keys and values
        self._proposals: dict[int, tuple[int, list[int]]] = {}  # row -> (position, drafts)

    def follow(self, step: Step) -> None:
        """Invalidate blocks that get new content, and find the blocks that are still valid for rows that
        start.
        """
        if self._device is not None:
            self._device.apply(step)
        loaded = () if step.copies is None else step.copies.loads
        fresh = [block_id for _, block_id in (*step.new_blocks, *loaded)]
        starts = dict(zip(step.rows, step.starts, strict=True)) if step.started else {}
        for started in step.started:
            fresh += started.block_ids[starts[started.row] // self._input_batch.block_size :]
        self._is_computed[fresh] = False
        for started in step.started:
            is_full = self._is_computed[list(started.block_ids)]
            num_full = len(is_full) if is_full.all() else int(is_full.argmin())
            self._num_computed[started.row] = num_full * self._input_batch.block_size
            self._proposals.pop(started.row, None)

    def propose(self, step: Step, sample: SampleFn) -> tuple[Step, float]:
        """Return the step with its ``draft_requests`` drafted, and the seconds that took; 0 if contexts
        had to be computed first, since that time does not predict the next one. A row whose context takes
        more than this step gets no drafts yet. If memory runs out no row gets any: drafts only save time.
        """
        if not step.draft_requests:
            return step, 0.0
        try:
            return self._propose(step, sample)
        except (RuntimeError, MemoryError) as error:
            if not oom_retry.is_out_of_memory(error):
                raise
        logger.error("out of memory in the draft model", extra={"rows": len(step.draft_requests)})
        for row, _ in step.draft_requests:
            self._forget(row)
        return _with_drafts(step, {row: [] for row, _ in step.draft_requests}), 0.0

    def _propose(self, step: Step, sample: SampleFn) -> tuple[Step, float]:
        began_at = time.perf_counter()
        newest = dict(zip(step.rows, step.starts, strict=True))
        draft_requests = dict(step.draft_requests)
        drafts: dict[int, list[int]] = {row: [] for row in draft_requests}
        chunks = self._uncomputed_chunks({row: newest[row] + 1 for row in draft_requests})
        is_usual = all(chunk.num_tokens <= _USUAL_TOKENS for chunk in chunks)
        while chunks:
            rows = self._compute(chunks, drafts, sample)
            chunks = [
                _Chunk(row, newest[row] + len(drafts[row]), 1, is_sampled=True)
                for row in rows
                if len(drafts[row]) < draft_requests[row]
            ]
        self._proposals.update({row: (newest[row] + 1, tokens) for row, tokens in drafts.items() if tokens})
        seconds = time.perf_counter() - began_at if is_usual else 0.0
        return _with_drafts(step, drafts), seconds

    def _forget(self, row: int) -> None:
        """Discard what is known about the row's blocks."""
        self._is_computed[self._input_batch.block_table[row, : self._input_batch.num_blocks[row]]] = False
        self._num_computed[row] = 0
        self._proposals.pop(row, None)

    def _uncomputed_chunks(self, lengths: dict[int, int]) -> list[_Chunk]:
        """The part of each row's context that is not in the cache, within the token budget; single tokens
        first.
        """
        chunks, budget = list[_Chunk](), self._step_tokens
        for row, length in lengths.items():
            self._keep_accepted(row, length)
            start = int(self._num_computed[row])
            count = min(length - start, budget)
            if count:
                chunks.append(_Chunk(row, start, count, is_sampled=start + count == length))
                self._advance(row, start + count)
            budget -= count
        return sorted(chunks, key=lambda chunk: chunk.num_tokens != 1)

    def _keep_accepted(self, row: int, length: int) -> None:
        """Mark accepted drafts as computed, except the last one, which was never an input."""
        if row not in self._proposals:
            return
        begin, tokens = self._proposals.pop(row)
        actual = self._input_batch.tokens[row, begin : min(length, begin + len(tokens)) - 1].tolist()
        wrong = (index for index, token in enumerate(actual) if token != tokens[index])
        self._advance(row, begin + next(wrong, len(actual)))

    def _advance(self, row: int, ready: int) -> None:
        size = self._input_batch.block_size
        self._is_computed[
            self._input_batch.block_table[row, self._num_computed[row] // size : ready // size]
        ] = True
        self._num_computed[row] = ready

    def _compute(self, chunks: list[_Chunk], drafts: dict[int, list[int]], sample: SampleFn) -> list[int]:
        """Run one forward pass; returns the rows that got a draft."""
        rows, starts, counts, is_sampled = zip(*chunks, strict=True)
        step = Step(0, (), (), rows, starts, counts, tuple(map(int, is_sampled)))
        layout = StepLayout.of(step)
        computed = self._forward(step, layout)
        if not layout.sampled_rows.size:
            return []
        # The two models may pad one vocabulary to different sizes.
        logits = computed.logits
        if padding := self._vocab_size - logits.shape[1]:
            computed = computed._replace(logits=functional.pad(logits, (0, padding), value=float("-inf")))
        gained: list[int] = layout.sampled_rows.tolist()
        tokens = sample(computed, layout.sampled_rows, layout.sampled_lengths)
        for row, token in zip(gained, tokens.tolist(), strict=True):
            drafts[row].append(token)
        return gained

    def _forward(self, step: Step, layout: StepLayout) -> ForwardOutput:
        if self._device is not None:
            return self._device.compute(step, layout, self._device.graph_for(step, layout))
        return ForwardOutput(self._logits_on_host(step, layout).float(), None, {})

    def _logits_on_host(self, step: Step, layout: StepLayout) -> Tensor:
        if self._recorded_decode is not None and self._recorded_decode.takes(step):
            return self._recorded_decode(layout, self._input_batch)
        config = self._model.config
        batch = batch_builder.build(step, layout, self._input_batch, config.num_kv_heads, config.windows)
        if config.vocab_size < self._vocab_size:
            batch.token_ids.clamp_(max=config.vocab_size - 1)
        return self._model(batch, self._kv_caches)


def _with_drafts(step: Step, drafts: dict[int, list[int]]) -> Step:
    """Let each row that wanted drafts compute and sample one token per draft, and one more."""

    def counted(numbers: tuple[int, ...]) -> tuple[int, ...]:
        pairs = zip(step.rows, numbers, strict=True)
        return tuple([1 + len(drafts[row]) if row in drafts else number for row, number in pairs])

    return dataclasses.replace(
        step,
        num_tokens=counted(step.num_tokens),
        samples=counted(step.samples),
        drafts=tuple([(row, tuple(tokens)) for row, tokens in drafts.items()]),
        draft_requests=(),
    )
