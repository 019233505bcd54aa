"""Attention of one new token per sequence over its paged cache. Called once per layer by attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.capped_attention import capped_attention, capped_scores
from quire_kernels.kv_quantization import KVScales, gather_kv, read_kv, with_scales
from quire_kernels.native import NATIVE

if torch.cuda.is_available():
    from quire_kernels.paged_decode_attention_triton import paged_decode_attention_triton

# Sequences are gathered together up to so many blocks, padding included: it bounds the work space.
MAX_GATHERED_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class DecodeGather:
    """On the CPU: consecutive sequences whose blocks are copied side by side, padded to the longest."""

    first: int
    last: int  # exclusive
    index: (
        Tensor  # i64 [sequences * Hkv * blocks], rows of a cache seen as [num_blocks * Hkv, block_size * D]
    )
    mask: Tensor  # f32 [sequences, 1, 1, tokens], 0 or -inf


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    out: Tensor | None = None,
    gather: Callable[[], tuple[DecodeGather, ...]] | None = None,
) -> Tensor:
    """Attention for q [B, Hq, D] -> [B, Hq, D].

    ``block_table`` i64 [B, blocks] names each sequence's blocks in order (entries past its end may repeat
    any of its own), ``seq_lens`` i64 [B] counts its tokens, the new one included. Only the last ``window`` of
    them are looked at; ``softcap`` bounds the scores by tanh; ``scales``
    are those of quantised caches. ``gather``, asked where torch computes, spares it some arithmetic per
    layer: ``decode_gather`` of the same table and window.
    """
    if q.is_cuda:
        return paged_decode_attention_triton(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            scale,
            window=window,
            softcap=softcap,
            scales=scales,
            out=out,
        )
    if NATIVE is not None and softcap is None and NATIVE.attends(q, k_cache, out):
        return NATIVE.decode_attention(q, k_cache, v_cache, block_table, seq_lens, scale, window, out)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _, num_kv_heads, block_size, head_size = k_cache.shape
    if gather is None:
        gather = partial(decode_gather, block_table, seq_lens, num_kv_heads, block_size, window=window)
    caches = with_scales(k_cache, v_cache, scales)
    for part in gather():
        count = part.last - part.first
        shape = (count, num_kv_heads, -1, head_size)
        # The query heads that share a KV head are rows of one small matrix: no repeated keys.
        queries = q[part.first : part.last].reshape(shape)
        k, v = (gather_kv(cache, scale, part.index, q.dtype).view(shape) for cache, scale in caches)
        if softcap is None:
            attended = functional.scaled_dot_product_attention(
                queries, k, v, attn_mask=part.mask.to(q.dtype), scale=scale
            )
        else:
            attended = capped_attention(queries, k, v, part.mask, scale, softcap)
        out[part.first : part.last] = attended.reshape(count, -1, head_size)
    return out


def decode_gather(
    block_table: Tensor,
    seq_lens: Tensor,
    num_kv_heads: int,
    block_size: int,
    *,
    window: int | None = None,
    max_blocks: int = MAX_GATHERED_BLOCKS,
) -> tuple[DecodeGather, ...]:
    """Plan the copies for a block table, once per step; blocks that lie before the window are not copied."""
    num_blocks = (seq_lens + block_size - 1) // block_size
    if window is not None:
        starts = (seq_lens - window).clamp_(min=0)
        first_blocks = starts // block_size
        num_blocks -= first_blocks
    blocks = num_blocks.tolist()
    parts, first = [], 0
    while first < len(blocks):
        last, longest = first + 1, blocks[first]
        while last < len(blocks):
            wider = max(longest, blocks[last])
            if (last + 1 - first) * wider > max_blocks:
                break
            last, longest = last + 1, wider
        positions = torch.arange(longest * block_size)
        if window is None:
            table, hidden = block_table[first:last, :longest], positions >= seq_lens[first:last, None]
        else:
            before = first_blocks[first:last, None]
            columns = (before + torch.arange(longest)).clamp_(max=block_table.shape[1] - 1)
            table, positions = block_table[first:last].gather(1, columns), before * block_size + positions
            hidden = (positions >= seq_lens[first:last, None]) | (positions < starts[first:last, None])
        index = (table[:, None] * num_kv_heads + torch.arange(num_kv_heads)[None, :, None]).flatten()
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        parts.append(DecodeGather(first, last, index, mask))
        first = last
    return tuple(parts)


def paged_decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """One sequence at a time, in float32."""
    num_kv_heads, _, head_size = k_cache.shape[1:]
    outputs = []
    for row, length in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(0, length - window)
        keys, values = (
            read_kv(cache, scale, block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_size)[:, first:length]
            for cache, scale in with_scales(k_cache, v_cache, scales)
        )
        grouped = q[row].view(num_kv_heads, -1, head_size).float()
        scores = capped_scores(grouped @ keys.transpose(1, 2) * scale, softcap)
        weights = torch.softmax(scores, dim=-1)
        outputs.append((weights @ values).view(-1, head_size))
    return torch.stack(outputs).to(q.dtype)
