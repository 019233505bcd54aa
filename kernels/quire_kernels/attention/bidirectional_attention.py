"""Attention in which each token of a text sees the whole text, of texts that are packed side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

if torch.cuda.is_available():
    from quire_kernels.attention.bidirectional_attention_triton import bidirectional_attention_triton


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """q, k, v [T, H, D], equally strided, of B texts -> [T, H, D]. ``cu_seqlens`` i64 [B + 1]: bounds of the
    texts; ``lengths``: the same as the host knows it. Nothing is padded, so that what a text gets depends on
    the others in its batch by the last bits of a product at most.
    """
    if q.is_cuda:
        return bidirectional_attention_triton(q, k, v, cu_seqlens, scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    first, index = 0, 0
    while index < len(lengths):
        length, count = lengths[index], 1
        while index + count < len(lengths) and lengths[index + count] == length:
            count += 1  # neighbours of equal length are computed together
        last = first + count * length
        queries, keys, values = (
            part[first:last].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[first:last] = attended.transpose(1, 2).flatten(0, 1)
        first, index = last, index + count
    return out


def bidirectional_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """One text at a time, in float32."""
    out, bounds = torch.empty_like(q, memory_format=torch.contiguous_format), cu_seqlens.tolist()
    for first, last in zip(bounds, bounds[1:], strict=False):
        queries, keys, values = (part[first:last].float().transpose(0, 1) for part in (q, k, v))
        weights = torch.softmax(queries @ keys.transpose(1, 2) * scale, dim=-1)
        out[first:last] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
