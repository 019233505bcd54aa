"""Builds the ForwardBatch of a Step: token ids, positions, KV cache slots, block tables and attention plans.

Pure array arithmetic on the host. Knows the input batch and the Step, and no model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.layers.ops import decode_gather, kv_cache_rows, prefill_spans
from quire_server.runner.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step as arrays, and the positions at which tokens are sampled."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sampled: NDArray[np.int64]  # index into the step's tokens
    sampled_rows: NDArray[np.int64]
    sampled_lengths: NDArray[np.int64]  # context length at the sampled position

    @classmethod
    def of(cls, step: Step) -> "StepLayout":
        """Build the arrays from the step's tuples."""
        rows, starts = np.array(step.rows, np.int64), np.array(step.starts, np.int64)
        if step.has_only_decodes:
            return cls.of_decodes(rows, starts)
        counts, samples = np.array(step.num_tokens, np.int64), np.array(step.samples, np.int64)
        ends, last = starts + counts, np.cumsum(counts) - 1
        if samples.max(initial=0) <= 1:
            is_sampled = samples > 0
            return cls(rows, starts, ends, last[is_sampled], rows[is_sampled], ends[is_sampled])
        # With drafts a row is sampled at its last positions: count back from the last one.
        back = np.repeat(np.cumsum(samples), samples) - np.arange(1, samples.sum() + 1)
        return cls(
            rows,
            starts,
            ends,
            np.repeat(last, samples) - back,
            np.repeat(rows, samples),
            np.repeat(ends, samples) - back,
        )

    @classmethod
    def of_decodes(cls, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> "StepLayout":
        """Of rows that compute and sample one token each."""
        ends = starts + 1
        return cls(rows, starts, ends, np.arange(len(rows)), rows, ends)

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, position) of each token of the step."""
        counts = self.ends - self.starts
        if len(counts) == counts.sum():
            return self.rows, self.starts
        return np.repeat(self.rows, counts), ranges(self.starts, counts)


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges [start, start + count) of all pairs."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(before - starts, counts)


def build(
    step: Step, layout: StepLayout, input_batch: InputBatch, num_kv_heads: int, windows: Iterable[int | None]
) -> ForwardBatch:
    """Build the tensors of one step, all of them views of new host arrays. ``windows``: the sliding windows
    of all layers.

    A row with drafts counts as several decodes over the same blocks, each with its own length.
    """
    token_rows, positions = layout.tokens()
    counts = layout.ends - layout.starts
    bounds = np.concatenate(([0], np.cumsum(counts)))
    slots = torch.from_numpy(input_batch.slots(token_rows, positions))
    whole = _leading_whole(step)
    decodes = int(bounds[whole])
    decode_table, decode_lens = _tables(input_batch, token_rows[:decodes], positions[:decodes] + 1)
    prefill_table, prefill_lens = _tables(input_batch, layout.rows[whole:], layout.ends[whole:])
    prefill_bounds = torch.from_numpy(bounds[whole:] - decodes)
    shape = (num_kv_heads, input_batch.block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(input_batch.tokens[token_rows, positions]),
        positions=torch.from_numpy(positions),
        slots=slots,
        sample_rows=torch.from_numpy(layout.sampled),
        num_decodes=decodes,
        num_queries=1,
        decode_table=decode_table,
        decode_lens=decode_lens,
        prefill_table=prefill_table,
        prefill_lens=prefill_lens,
        prefill_bounds=prefill_bounds,
        prefill_chunks=tuple(zip(counts[whole:].tolist(), layout.ends[whole:].tolist(), strict=True)),
        cache_rows=cache(partial(kv_cache_rows, slots, *shape)),
        plans=_plans(
            windows, shape, (decode_table, decode_lens), (prefill_table, prefill_lens, prefill_bounds)
        ),
    )


def decodes(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    shape: tuple[int, int],
    windows: Iterable[int | None],
) -> ForwardBatch:
    """Build a batch in which each row of ``table`` has the same number of tokens, its last ones, all of them
    sampled. ``shape``: KV heads, block size. Only tensor operations that a CUDA graph can capture.
    """
    none = torch.empty(0, dtype=torch.int64, device=table.device)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        sample_rows=positions,  # same length as the tokens: every one is sampled
        num_decodes=len(positions),
        num_queries=len(positions) // len(table),
        decode_table=table,
        decode_lens=lengths,
        prefill_table=none,
        prefill_lens=none,
        prefill_bounds=none,
        prefill_chunks=(),
        cache_rows=cache(partial(kv_cache_rows, slots, *shape)),
        plans=_plans(windows, shape, (table, lengths), (none, none, none)),
    )


def _plans(
    windows: Iterable[int | None],
    shape: tuple[int, int],
    decode: tuple[Tensor, Tensor],
    prefill: tuple[Tensor, Tensor, Tensor],
) -> dict[int | None, AttentionPlan]:
    return {
        window: AttentionPlan(
            cache(partial(decode_gather, *decode, *shape, window=window)),
            cache(partial(prefill_spans, *prefill, *shape, window=window)),
        )
        for window in windows
    }


def _leading_whole(step: Step) -> int:
    """How many rows, from the first on, have a single token or are sampled at every token."""
    counts = zip(step.num_tokens, step.samples, strict=True)
    return next(
        (index for index, (count, samples) in enumerate(counts) if count != 1 and count != samples),
        len(step.rows),
    )


def _tables(
    input_batch: InputBatch, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(input_batch.table(row_ids, lengths)), torch.from_numpy(lengths)
