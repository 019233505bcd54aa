"""Causal attention of a chunk of new tokens per sequence over its paged cache. Called once per layer by
attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.capped_attention import capped_attention, capped_scores
from quire_kernels.kv_quantization import KVScales, gather_kv, read_kv, with_scales
from quire_kernels.native import NATIVE

if torch.cuda.is_available():
    from quire_kernels.paged_prefill_attention_triton import paged_prefill_attention_triton

# Below it, gathering a prompt's blocks costs more launches than torch's attention can save. Not measured.
MIN_WHOLE_PROMPT = 512


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """On the CPU: one sequence's chunk, with its blocks and mask prepared."""

    first: int
    last: int  # exclusive, in q
    length: int  # tokens that the chunk can see, itself included, counted from the first copied block
    index: Tensor  # i64 [Hkv * blocks], rows of a cache seen as [num_blocks * Hkv, block_size * D]
    mask: Tensor | None  # f32 [chunk, length], 0 or -inf; None: causal, the chunk is the whole sequence


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
    out: Tensor | None = None,
    spans: Callable[[], tuple[PrefillSpan, ...]] | None = None,
    chunks: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Attention for packed q [T, Hq, D] -> [T, Hq, D]; each chunk is the end of its sequence.

    ``cu_q`` i64 [B + 1] bounds the chunks in q, ``seq_lens`` i64 [B] counts each sequence's tokens up to
    the end of its chunk; ``block_table``, ``window`` (the token itself counts) and ``softcap`` and
    ``scales`` as for decode.
    ``spans``, asked where torch computes, spares it some arithmetic per layer: ``prefill_spans`` of the same
    table and window. ``chunks``, (tokens, tokens up to its end) of each, lets a GPU's host choose the way
    without waiting for the device: ``are_whole_prompts``.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.is_cuda:
        if chunks is not None and are_whole_prompts(chunks, window=window, softcap=softcap):
            whole = [length for _, length in chunks]
            return whole_prompt_attention(q, k_cache, v_cache, block_table, whole, scale, scales, out)
        return paged_prefill_attention_triton(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            cu_q,
            scale,
            window=window,
            softcap=softcap,
            scales=scales,
            out=out,
        )
    if NATIVE is not None and softcap is None and NATIVE.attends(q, k_cache, out):
        bounds = cu_q.tolist()
        for row, length in enumerate(seq_lens.tolist()):
            part = slice(bounds[row], bounds[row + 1])
            # Each token is a sequence of its own length over the same blocks: chunks change not one bit.
            lengths = torch.arange(length + bounds[row] - bounds[row + 1] + 1, length + 1)
            NATIVE.decode_attention(
                q[part], k_cache, v_cache, block_table[row], lengths, scale, window, out[part]
            )
        return out
    _, num_kv_heads, block_size, head_size = k_cache.shape
    if spans is None:
        spans = partial(prefill_spans, block_table, seq_lens, cu_q, num_kv_heads, block_size, window=window)
    caches = with_scales(k_cache, v_cache, scales)
    for span in spans():
        shape = (1, num_kv_heads, -1, head_size)
        queries = q[None, span.first : span.last].transpose(1, 2)
        k, v = (
            gather_kv(cache, scale, span.index, q.dtype).view(shape)[:, :, : span.length]
            for cache, scale in caches
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
    """Whether torch's causal attention serves: prompts without cached prefixes, of some length, all seen.

    There it is faster than ours until a measurement says otherwise: a GPU's vendor wrote it.
    """
    return softcap is None and all(
        MIN_WHOLE_PROMPT <= new == length and (window is None or length <= window) for new, length in chunks
    )


def whole_prompt_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Sequence[int],
    scale: float,
    scales: KVScales | None,
    out: Tensor,
) -> Tensor:
    """Each prompt's blocks side by side, then torch's own attention; packed q is all of the prompts."""
    num_kv_heads, block_size, head_size = k_cache.shape[1:]
    heads, first = torch.arange(num_kv_heads, device=q.device)[:, None], 0
    for row, length in enumerate(lengths):
        index = (block_table[row, None, : -(-length // block_size)] * num_kv_heads + heads).flatten()
        k, v = (
            gather_kv(cache, its, index, q.dtype).view(1, num_kv_heads, -1, head_size)[:, :, :length]
            for cache, its in with_scales(k_cache, v_cache, scales)
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
    """Plan copies and masks, once per step; blocks that no token of the chunk can see are not copied."""
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
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """One sequence at a time, in float32."""
    num_kv_heads, _, head_size = k_cache.shape[1:]
    out = torch.empty_like(q)
    bounds = cu_q.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = bounds[row], bounds[row + 1]
        keys, values = (
            read_kv(cache, scale, block_table[row])
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_size)[:, :length]
            for cache, scale in with_scales(k_cache, v_cache, scales)
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
