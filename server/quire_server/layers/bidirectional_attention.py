"""Attention in which each token of a text sees the whole text, of texts that are packed side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def bidirectional_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """q, k, v [T, H, D] of texts with ``lengths`` that add up to T -> [T, H, D], by torch's attention.

    Neighbours of equal length are computed together; no text is padded, so that its vector does not depend on
    the others in its batch.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    first, index = 0, 0
    while index < len(lengths):
        length, count = lengths[index], 1
        while index + count < len(lengths) and lengths[index + count] == length:
            count += 1
        last = first + count * length
        queries, keys, values = (
            part[first:last].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[first:last] = attended.transpose(1, 2).flatten(0, 1)
        first, index = last, index + count
    return out
