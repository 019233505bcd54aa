"""Step -> ForwardBatch: which tokens, where they stand, where their keys and values go. Called by
``model_runner``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_server.core.step import Step
from quire_server.layers.batch_plan import decode_gather, kv_cache_rows, prefill_spans
from quire_server.layers.forward_batch import AttentionPlan, ForwardBatch
from quire_server.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class Spans:
    """The step's rows as arrays, and each position at which a token is sampled."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sampled: NDArray[np.int64]  # index among the step's tokens
    sampled_rows: NDArray[np.int64]
    sampled_lengths: NDArray[np.int64]  # tokens up to there

    @classmethod
    def of(cls, step: Step) -> "Spans":
        """From the step's tuples."""
        rows, starts = np.array(step.rows, np.int64), np.array(step.starts, np.int64)
        counts, samples = np.array(step.num_tokens, np.int64), np.array(step.samples, np.int64)
        ends, last = starts + counts, np.cumsum(counts) - 1
        if samples.max(initial=0) <= 1:
            is_sampled = samples > 0
            return cls(rows, starts, ends, last[is_sampled], rows[is_sampled], ends[is_sampled])
        # With drafts: a row's last position is its last sample, those before go back from it.
        back = np.repeat(np.cumsum(samples), samples) - np.arange(1, samples.sum() + 1)
        return cls(
            rows,
            starts,
            ends,
            np.repeat(last, samples) - back,
            np.repeat(rows, samples),
            np.repeat(ends, samples) - back,
        )

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, position) of each token of the step."""
        counts = self.ends - self.starts
        if len(counts) == counts.sum():
            return self.rows, self.starts
        return np.repeat(self.rows, counts), ranges(self.starts, counts)


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... of each, so many as it counts."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(before - starts, counts)


def build(
    step: Step, spans: Spans, rows: Rows, num_kv_heads: int, windows: Iterable[int | None]
) -> ForwardBatch:
    """The tensors of one step; all of them views of fresh host arrays. ``windows``: those of all layers.

    A row with drafts is so many decodes, each of its own length over the same blocks.
    """
    token_rows, positions = spans.tokens()
    counts = spans.ends - spans.starts
    bounds = np.concatenate(([0], np.cumsum(counts)))
    slots = torch.from_numpy(rows.slots(token_rows, positions))
    whole = _leading_whole(step)
    decodes = int(bounds[whole])
    decode_table, decode_lens = _tables(rows, token_rows[:decodes], positions[:decodes] + 1)
    prefill_table, prefill_lens = _tables(rows, spans.rows[whole:], spans.ends[whole:])
    prefill_bounds = torch.from_numpy(bounds[whole:] - decodes)
    shape = (num_kv_heads, rows.block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(rows.tokens[token_rows, positions]),
        positions=torch.from_numpy(positions),
        slots=slots,
        sample_rows=torch.from_numpy(spans.sampled),
        num_decodes=decodes,
        num_queries=1,
        decode_table=decode_table,
        decode_lens=decode_lens,
        prefill_table=prefill_table,
        prefill_lens=prefill_lens,
        prefill_bounds=prefill_bounds,
        prefill_chunks=tuple(zip(counts[whole:].tolist(), spans.ends[whole:].tolist(), strict=True)),
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
    """The last tokens of each row of the table, as many of all, every one of which is sampled; ``shape``: KV
    heads, block size.
    """
    none = torch.empty(0, dtype=torch.int64, device=table.device)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        sample_rows=positions,  # as many as there are tokens: all of them
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
    """How many rows, from the first on, have one token or sample at each."""
    counts = zip(step.num_tokens, step.samples, strict=True)
    return next(
        (index for index, (count, samples) in enumerate(counts) if count != 1 and count != samples),
        len(step.rows),
    )


def _tables(rows: Rows, row_ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.table(row_ids, lengths)), torch.from_numpy(lengths)
