"""Prefill attention: causal attention of a chunk of new tokens per sequence over the paged KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.attention.softcap import capped_attention, capped_scores
from quire_kernels.cpu.native import NATIVE
from quire_kernels.paged_kv_cache import PagedKVCache, gather_kv, read_kv

if torch.cuda.is_available():
    from quire_kernels.attention.paged_prefill_attention_triton import paged_prefill_attention_triton

# For shorter prompts, gathering the blocks costs more launches than torch's attention saves. Not measured.
MIN_WHOLE_PROMPT = 512


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """CPU only: one sequence's chunk, with its blocks and mask prepared."""

    first: int
    last: int  # exclusive, in q
    length: int  # tokens that the chunk attends to, itself included, counted from the first copied block
    index: Tensor  # i64 [Hkv * blocks], rows of a cache seen as [num_blocks * Hkv, block_size * D]
    mask: Tensor | None  # f32 [chunk, length], 0 or -inf; None: plain causal, the chunk is the whole sequence


def paged_prefill_attention(
    q: Tensor,
    kv: PagedKVCache,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    spans: Callable[[], tuple[PrefillSpan, ...]] | None = None,
    chunks: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Packed q [T, Hq, D] -> [T, Hq, D]; each chunk is the end of its sequence, and in the cache already.

    ``cu_q`` i64 [B + 1]: bounds of the chunks in q. ``kv.seq_lens`` counts each sequence's tokens up to the
    end of its chunk. ``window`` and ``softcap`` as for decode. ``spans`` returns ``prefill_spans`` of the
    same block table and window; only the torch implementation calls it, so that the layers of a step compute
    the plan once. ``chunks``: (tokens, tokens up to its end) of each chunk, from which the host of a GPU
    chooses the implementation (``are_whole_prompts``) without waiting for the device.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.is_cuda:
        if chunks is not None and are_whole_prompts(chunks, window=window, softcap=softcap):
            whole = [length for _, length in chunks]
            return whole_prompt_attention(q, kv, whole, scale, out)
        return paged_prefill_attention_triton(q, kv, cu_q, scale, window=window, softcap=softcap, out=out)
    if NATIVE is not None and softcap is None and NATIVE.supports_attention(q, kv.cache, out):
        bounds = cu_q.tolist()
        for row, length in enumerate(kv.seq_lens.tolist()):
            part = slice(bounds[row], bounds[row + 1])
            # Each token is decoded as a sequence of its own length over the same blocks, so the result is
            # bitwise independent of how a prompt is cut into chunks.
            lengths = torch.arange(length + bounds[row] - bounds[row + 1] + 1, length + 1)
            prefixes = PagedKVCache(kv.cache, kv.block_table[row], lengths)
            NATIVE.decode_attention(q[part], prefixes, scale, window, out[part])
        return out
    _, num_kv_heads, block_size, head_size = kv.cache.keys.shape
    if spans is None:
        spans = partial(
            prefill_spans, kv.block_table, kv.seq_lens, cu_q, num_kv_heads, block_size, window=window
        )
    both = kv.cache.with_scales()
    for span in spans():
        shape = (1, num_kv_heads, -1, head_size)
        queries = q[None, span.first : span.last].transpose(1, 2)
        k, v = (
            gather_kv(data, scales, span.index, q.dtype).view(shape)[:, :, : span.length]
            for data, scales in both
        )
        if softcap is None:
            attended = functional.scaled_dot_product_attention(
                queries,
                k,
                v,
                attn_mask=None if span.mask is None else span.mask.to(q.dtype),
                is_causal=span.mask is None,
                scale=scale,
                enable_gqa=True,
            )
        else:
            group = queries.shape[1] // num_kv_heads
            k, v = (heads.repeat_interleave(group, dim=1) for heads in (k, v))
            attended = capped_attention(queries, k, v, span.mask, scale, softcap)
        out[span.first : span.last] = attended[0].transpose(0, 1)
    return out


def are_whole_prompts(
    chunks: Sequence[tuple[int, int]], *, window: int | None, softcap: float | None
) -> bool:
    """Whether torch's causal attention applies: long prompts, no cached prefix, none exceeding the window.

    It is NVIDIA's own kernel, assumed to be faster than ours until a measurement shows otherwise.
    """
    return softcap is None and all(
        MIN_WHOLE_PROMPT <= new == length and (window is None or length <= window) for new, length in chunks
    )


def whole_prompt_attention(
    q: Tensor, kv: PagedKVCache, lengths: Sequence[int], scale: float, out: Tensor
) -> Tensor:
    """Copy each prompt's blocks side by side, then torch's attention; q is the packed prompts, whole.

    ``lengths`` are those of ``kv.seq_lens``, as the host knows them.
    """
    num_kv_heads, block_size, head_size = kv.cache.keys.shape[1:]
    heads, first = torch.arange(num_kv_heads, device=q.device)[:, None], 0
    for row, length in enumerate(lengths):
        index = (kv.block_table[row, None, : -(-length // block_size)] * num_kv_heads + heads).flatten()
        k, v = (
            gather_kv(data, scales, index, q.dtype).view(1, num_kv_heads, -1, head_size)[:, :, :length]
            for data, scales in kv.cache.with_scales()
        )
        queries = q[None, first : first + length].transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            queries, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        out[first : first + length] = attended[0].transpose(0, 1)
        first += length
    return out


def prefill_spans(
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    num_kv_heads: int,
    block_size: int,
    *,
    window: int | None = None,
) -> tuple[PrefillSpan, ...]:
    """Plan copies and masks, once per step; blocks outside of every window of the chunk are not copied."""
    bounds, heads = cu_q.tolist(), torch.arange(num_kv_heads)[:, None]
    spans = []
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        start = length - (last - first)
        first_block = 0 if window is None else max(0, start - window + 1) // block_size
        num_blocks = -(-length // block_size)
        index = (block_table[row, None, first_block:num_blocks] * num_kv_heads + heads).flatten()
        visible = length - first_block * block_size
        mask = None
        if start or (window is not None and length > window):
            mask = torch.full((last - first, visible), float("-inf")).triu_(visible - (last - first) + 1)
            if window is not None:
                distance = torch.arange(visible) - torch.arange(visible - (last - first), visible)[:, None]
                mask.masked_fill_(distance <= -window, float("-inf"))
        spans.append(PrefillSpan(first, last, visible, index, mask))
    return tuple(spans)


def paged_prefill_attention_reference(
    q: Tensor,
    kv: PagedKVCache,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One sequence at a time, in float32."""
    num_kv_heads, _, head_size = kv.cache.keys.shape[1:]
    out = torch.empty_like(q)
    bounds = cu_q.tolist()
    for row, length in enumerate(kv.seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        keys, values = (
            read_kv(data, scales, kv.block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_size)[:, :length]
            for data, scales in kv.cache.with_scales()
        )
        group = q.shape[1] // num_kv_heads
        grouped = q[first:last].float().view(-1, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
        scores = grouped @ keys[:, None].transpose(2, 3) * scale  # [Hkv, group, chunk, length]
        scores = capped_scores(scores, softcap)
        distance = torch.arange(length - (last - first), length, device=q.device)[:, None] - torch.arange(
            length, device=q.device
        )
        allowed = (distance >= 0) & (distance < (window or length))
        weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
        out[first:last] = (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out
