"""Decode attention: one new token per sequence over the paged KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.attention.softcap import capped_attention, capped_scores
from quire_kernels.cpu.native import NATIVE
from quire_kernels.paged_kv_cache import PagedKVCache, gather_kv, read_kv

if torch.cuda.is_available():
    from quire_kernels.attention.paged_decode_attention_triton import paged_decode_attention_triton

# Blocks that are gathered for one group of sequences, padding included: bounds the temporary memory.
MAX_GATHERED_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class DecodeGather:
    """CPU only: consecutive sequences whose blocks are copied side by side, padded to the longest."""

    first: int
    last: int  # exclusive
    # i64 [sequences * Hkv * blocks], rows of a cache seen as [num_blocks * Hkv, block_size * D]
    index: Tensor
    mask: Tensor  # f32 [sequences, 1, 1, tokens], 0 or -inf


def paged_decode_attention(
    q: Tensor,
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    gather: Callable[[], tuple[DecodeGather, ...]] | None = None,
) -> Tensor:
    """q [B, Hq, D] -> [B, Hq, D]. The new token's key and value are in the cache already.

    ``window``: each token attends to that many last tokens, itself included. ``softcap`` bounds the scores by
    tanh. ``gather`` returns ``decode_gather`` of the same block table and window; only the torch
    implementation calls it, so that the layers of a step compute the plan once.
    """
    if q.is_cuda:
        return paged_decode_attention_triton(q, kv, scale, window=window, softcap=softcap, out=out)
    if NATIVE is not None and softcap is None and NATIVE.supports_attention(q, kv.cache, out):
        return NATIVE.decode_attention(q, kv, scale, window, out)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _, num_kv_heads, block_size, head_size = kv.cache.keys.shape
    if gather is None:
        gather = partial(decode_gather, kv.block_table, kv.seq_lens, num_kv_heads, block_size, window=window)
    both = kv.cache.with_scales()
    for part in gather():
        count = part.last - part.first
        shape = (count, num_kv_heads, -1, head_size)
        # The query heads that share a KV head become rows of one small matrix, so keys are not repeated.
        queries = q[part.first : part.last].reshape(shape)
        k, v = (gather_kv(data, scales, part.index, q.dtype).view(shape) for data, scales in both)
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
    """Plan the copies for a block table, once per step; blocks before the window are not copied."""
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
    kv: PagedKVCache,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One sequence at a time, in float32."""
    num_kv_heads, _, head_size = kv.cache.keys.shape[1:]
    outputs = []
    for row, length in enumerate(kv.seq_lens.tolist()):
        first = 0 if window is None else max(0, length - window)
        keys, values = (
            read_kv(data, scales, kv.block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_size)[:, first:length]
            for data, scales in kv.cache.with_scales()
        )
        grouped = q[row].view(num_kv_heads, -1, head_size).float()
        scores = capped_scores(grouped @ keys.transpose(1, 2) * scale, softcap)
        weights = torch.softmax(scores, dim=-1)
        outputs.append((weights @ values).view(-1, head_size))
    return torch.stack(outputs).to(q.dtype)
