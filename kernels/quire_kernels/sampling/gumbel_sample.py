"""Sampling without softmax or sort: the arg-max of logits plus Gumbel noise (Gumbel-max trick).

The noise of a token depends on (seed, position, token id) alone, by the counter-based generator Philox, so a
sample does not depend on the batch, on chunking or on preemption, and is the same on every device.
"""

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.sampling.gumbel_sample_triton import gumbel_sample_triton

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    threshold: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Token ids i64 [B] drawn from softmax(logits / temperature), logits f32 [B, V].

    ``temperature`` f32 [B]: a row of 0 takes its first largest logit; ``seeds`` and ``positions`` i64 [B].
    Tokens whose logits / temperature lie below ``threshold`` f32 [B] are never drawn.
    """
    if logits.is_cuda:
        return gumbel_sample_triton(logits, temperature, seeds, positions, threshold=threshold, out=out)
    tokens = gumbel_sample_reference(logits, temperature, seeds, positions, threshold)
    return tokens if out is None else out.copy_(tokens)


def gumbel_sample_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, threshold: Tensor | None = None
) -> Tensor:
    """The definition: every device gives these token ids."""
    is_drawn = temperature > 0
    scaled = logits / temperature.where(is_drawn, 1.0)[:, None]
    if threshold is not None:
        scaled = scaled.masked_fill(scaled < threshold[:, None], float("-inf"))
    noise = gumbel_noise(seeds, positions, logits.shape[1])
    return (scaled + noise.where(is_drawn[:, None], 0.0)).argmax(dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """f32 [B, num_tokens]. Token 4 c + lane takes that lane of Philox(counter (c, position), key seed)."""
    counters = torch.arange((num_tokens + 3) // 4, device=seeds.device)[None].expand(seeds.shape[0], -1)
    lanes = philox(counters, positions[:, None], seeds[:, None])
    words = torch.stack(lanes, dim=-1).flatten(1)[:, :num_tokens]
    uniform = (words.double() + 0.5).mul_(2.0**-32).float()
    # log1p keeps tiny uniforms, whose noise is the largest, at full precision; 1.0, by rounding, gives -inf.
    return -torch.log(-torch.log1p(-uniform))


def philox(counter: Tensor, position: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on counter words (counter, position low, position high, 0); unsigned 32 bits in int64."""
    c0, c1 = counter & _MASK, (position & _MASK).expand_as(counter)
    c2, c3 = ((position >> 32) & _MASK).expand_as(counter), torch.zeros_like(counter)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        first, second = (
            c0 * _MULTIPLIERS[0],
            c2 * _MULTIPLIERS[1],
        )  # products wrap in int64; their bits are right
        c0, c1 = ((second >> 32) & _MASK) ^ c1 ^ k0, second & _MASK
        c2, c3 = ((first >> 32) & _MASK) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
