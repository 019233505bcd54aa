"""ForwardBatch: the tensors of one step, immutable; everything that a layer may know about the batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quire_kernels import DecodeGather, PrefillSpan


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index arithmetic of attention by torch operations, shared by all layers with the same window. Computed
    on first use; native kernels do not need it.
    """

    decode_gather: Callable[[], tuple[DecodeGather, ...]]
    prefill_spans: Callable[[], tuple[PrefillSpan, ...]]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all rows, packed. Tokens [0, num_decodes) are decodes, the rest are prompt chunks."""

    token_ids: Tensor  # i64 [T]
    positions: Tensor  # i64 [T]
    slots: Tensor  # i64 [T], block_id * block_size + offset
    sample_rows: Tensor  # i64 [S], indices of the sampled tokens
    num_decodes: int
    num_queries: int  # decode tokens per sequence: more than one where drafts are verified
    decode_table: Tensor  # i64 [num_decodes / num_queries, blocks]
    decode_lens: Tensor  # i64 [num_decodes / num_queries]
    prefill_table: Tensor  # i64 [chunks, blocks]
    prefill_lens: Tensor  # i64 [chunks]
    prefill_bounds: Tensor  # i64 [chunks + 1], relative to num_decodes
    prefill_chunks: tuple[tuple[int, int], ...]  # (tokens, tokens up to its end) of each chunk
    cache_rows: Callable[[], Tensor]  # i64 [T * Hkv], rows of the flat cache to write, computed on first use
    plans: Mapping[int | None, AttentionPlan]  # by sliding window; None: full attention
