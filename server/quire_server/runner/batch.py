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
    """The step's rows as arrays."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, step: Step) -> "Spans":
        """From the step's tuples."""
        starts = np.array(step.starts, np.int64)
        return cls(np.array(step.rows, np.int64), starts, starts + np.array(step.num_tokens, np.int64))


def build(
    step: Step, spans: Spans, rows: Rows, num_kv_heads: int, windows: Iterable[int | None]
) -> ForwardBatch:
    """The tensors of one step; all of them views of fresh host arrays. ``windows``: those of all layers."""
    counts = spans.ends - spans.starts
    token_rows = np.repeat(spans.rows, counts)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - spans.starts, counts)
    slots = torch.from_numpy(rows.slots(token_rows, positions))
    decodes = _leading_ones(step.num_tokens)
    decode_table, decode_lens = _tables(rows, spans, slice(0, decodes))
    prefill_table, prefill_lens = _tables(rows, spans, slice(decodes, None))
    prefill_bounds = torch.from_numpy(bounds[decodes:] - decodes)
    shape = (num_kv_heads, rows.block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(rows.tokens[token_rows, positions]),
        positions=torch.from_numpy(positions),
        slots=slots,
        sample_rows=torch.from_numpy((bounds[1:] - 1)[np.array(step.samples, bool)]),
        num_decodes=decodes,
        decode_table=decode_table,
        decode_lens=decode_lens,
        prefill_table=prefill_table,
        prefill_lens=prefill_lens,
        prefill_bounds=prefill_bounds,
        cache_rows=cache(partial(kv_cache_rows, slots, *shape)),
        plans={
            window: AttentionPlan(
                cache(partial(decode_gather, decode_table, decode_lens, *shape, window=window)),
                cache(
                    partial(prefill_spans, prefill_table, prefill_lens, prefill_bounds, *shape, window=window)
                ),
            )
            for window in windows
        },
    )


def _leading_ones(num_tokens: tuple[int, ...]) -> int:
    return next((index for index, count in enumerate(num_tokens) if count != 1), len(num_tokens))


def _tables(rows: Rows, spans: Spans, part: slice) -> tuple[Tensor, Tensor]:
    lengths = spans.ends[part]
    return torch.from_numpy(rows.table(spans.rows[part], lengths)), torch.from_numpy(lengths)
