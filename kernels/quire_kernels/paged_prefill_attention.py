"""Causal attention of a chunk of new tokens per sequence over its paged cache. Called once per layer by
attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """On the CPU: one sequence's chunk, with its blocks and mask prepared."""

    first: int
    last: int  # exclusive, in q
    length: int  # tokens of the sequence, the chunk included
    index: Tensor  # i64 [Hkv * blocks], rows of a cache seen as [num_blocks * Hkv, block_size * D]
    mask: Tensor | None  # f32 [chunk, length], 0 or -inf; None: the chunk is the whole sequence


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    spans: tuple[PrefillSpan, ...] | None = None,
) -> Tensor:
    """Attention for packed q [T, Hq, D] -> [T, Hq, D]; each chunk is the end of its sequence.

    ``cu_q`` i64 [B + 1] bounds the chunks in q, ``seq_lens`` i64 [B] counts each sequence's tokens up to
    the end of its chunk; ``block_table`` as for decode. ``spans`` spares the CPU some arithmetic per layer.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.device.type != "cpu":
        reference = paged_prefill_attention_reference(q, k_cache, v_cache, block_table, seq_lens, cu_q, scale)
        return out.copy_(reference)
    num_blocks, num_kv_heads, block_size, head_size = k_cache.shape
    if spans is None:
        spans = prefill_spans(block_table, seq_lens, cu_q, num_kv_heads, block_size)
    keys = k_cache.view(num_blocks * num_kv_heads, -1)
    values = v_cache.view(num_blocks * num_kv_heads, -1)
    for span in spans:
        shape = (1, num_kv_heads, -1, head_size)
        attended = functional.scaled_dot_product_attention(
            q[None, span.first : span.last].transpose(1, 2),
            keys.index_select(0, span.index).view(shape)[:, :, : span.length],
            values.index_select(0, span.index).view(shape)[:, :, : span.length],
            attn_mask=None if span.mask is None else span.mask.to(q.dtype),
            is_causal=span.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[span.first : span.last] = attended[0].transpose(0, 1)
    return out


def prefill_spans(
    block_table: Tensor, seq_lens: Tensor, cu_q: Tensor, num_kv_heads: int, block_size: int
) -> tuple[PrefillSpan, ...]:
    """Plan copies and masks, once per step."""
    bounds, heads = cu_q.tolist(), torch.arange(num_kv_heads)[:, None]
    spans = []
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        num_blocks = -(-length // block_size)
        index = (block_table[row, None, :num_blocks] * num_kv_heads + heads).flatten()
        mask = None
        if last - first < length:
            mask = torch.full((last - first, length), float("-inf")).triu_(length - (last - first) + 1)
        spans.append(PrefillSpan(first, last, length, index, mask))
    return tuple(spans)


def paged_prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
) -> Tensor:
    """One sequence at a time, in float32."""
    num_kv_heads, _, head_size = k_cache.shape[1:]
    out = torch.empty_like(q)
    bounds = cu_q.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        keys, values = (
            cache[block_table[row]].transpose(0, 1).reshape(num_kv_heads, -1, head_size)[:, :length].float()
            for cache in (k_cache, v_cache)
        )
        grouped = q[first:last].float().view(last - first, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
        scores = grouped @ keys[:, None].transpose(2, 3) * scale  # [Hkv, group, chunk, length]
        allowed = (
            torch.arange(length, device=q.device)
            <= torch.arange(length - (last - first), length, device=q.device)[:, None]
        )
        weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
        out[first:last] = (
            (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(last - first, -1, head_size).to(q.dtype)
        )
    return out
