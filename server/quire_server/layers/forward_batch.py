"""The tensors of one step, frozen: what every layer may know of the batch. Built by ``runner.batch``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quire_kernels import DecodeGather, PrefillSpan


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Arithmetic that torch's way of attention would otherwise repeat in each layer with the same window.

    Done when the first of them asks: where native kernels compute, none does.
    """

    decode_gather: Callable[[], tuple[DecodeGather, ...]]
    prefill_spans: Callable[[], tuple[PrefillSpan, ...]]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Packed tokens, decodes first: tokens [0, num_decodes) decode, the rest are chunks of prompts."""

    token_ids: Tensor  # i64 [T]
    positions: Tensor  # i64 [T]
    slots: Tensor  # i64 [T], block_id * block_size + offset
    sample_rows: Tensor  # i64 [S], tokens whose logits are wanted
    num_decodes: int
    num_queries: int  # decodes of each sequence, its last tokens: more than one where drafts are verified
    decode_table: Tensor  # i64 [num_decodes / num_queries, blocks]
    decode_lens: Tensor  # i64 [num_decodes / num_queries]
    prefill_table: Tensor  # i64 [chunks, blocks]
    prefill_lens: Tensor  # i64 [chunks]
    prefill_bounds: Tensor  # i64 [chunks + 1], relative to num_decodes
    prefill_chunks: tuple[tuple[int, int], ...]  # (tokens, tokens up to its end) of each chunk
    cache_rows: Callable[[], Tensor]  # i64 [T * Hkv], where keys and values go in the flat cache; as lazy
    plans: Mapping[int | None, AttentionPlan]  # by sliding window; None: layers that see everything
