"""Masks the tokens that a grammar does not allow (structured output)."""

import torch
from torch import Tensor

from quire_kernels.cpu.native import NATIVE

if torch.cuda.is_available():
    from quire_kernels.sampling.apply_token_bitmask_triton import apply_token_bitmask_triton


def apply_token_bitmask(
    logits: Tensor, bitmask: Tensor, positions: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """logits [B, V] with -inf for every token that ``bitmask`` does not allow; ``out`` may be ``logits``.

    ``bitmask`` i32 [E, ceil(V / 32)]: one bit per token, lowest bit of a word first, as llguidance fills it.
    Mask e applies to row ``positions[e]``, i64 [E], at most one mask per row; a negative position is padding.
    """
    if logits.is_cuda:
        return apply_token_bitmask_triton(logits, bitmask, positions, out=out)
    if NATIVE is not None and NATIVE.supports_bitmask(logits, bitmask, out):
        out = logits.clone() if out is None else out if out is logits else out.copy_(logits)
        NATIVE.token_bitmask(out, bitmask, positions)
        return out
    return apply_token_bitmask_reference(logits, bitmask, positions, out=out)


def apply_token_bitmask_reference(
    logits: Tensor, bitmask: Tensor, positions: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """One mask at a time."""
    out = logits.clone() if out is None else out.copy_(logits)
    for words, position in zip(bitmask, positions.tolist(), strict=True):
        if position >= 0:
            bits = words[:, None] >> torch.arange(32, dtype=words.dtype, device=words.device) & 1
            out[position].masked_fill_(bits.flatten()[: logits.shape[1]] == 0, float("-inf"))
    return out
