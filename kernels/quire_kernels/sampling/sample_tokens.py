"""From logits to tokens: the largest, or a draw by temperature, top-k, top-p and min-p. On a CPU it is one
function in C, which looks at few of the tokens twice.
"""

import torch
from torch import Tensor

from quire_kernels.cpu.token_sampler import TOKEN_SAMPLER
from quire_kernels.sampling.gumbel_sample import gumbel_sample
from quire_kernels.sampling.topk_topp_threshold import topk_topp_threshold


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """(token ids i64 [S], largest logits f32 [S], NaN where a row has one) of the ``rows`` i64 [S] of logits
    f32 [B, V] in a CPU's memory.

    ``temperature`` f32 [S], 0 takes the first of the largest; ``top_k`` i64 [S], 0 = off; ``top_p`` f32 [S],
    1 = off; ``min_p`` f32 [S], 0 = off; ``seeds`` and ``positions`` i64 [S], which the noise depends on.
    Top-p applies to the mass that top-k leaves, min-p is a share of the largest probability.
    """
    if TOKEN_SAMPLER is not None and TOKEN_SAMPLER.supports(logits):
        return TOKEN_SAMPLER.sample(logits, rows, temperature, top_k, top_p, min_p, seeds, positions)
    return sample_tokens_reference(logits, rows, temperature, top_k, top_p, min_p, seeds, positions)


def sample_tokens_reference(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same by torch."""
    values = logits[rows]
    places = torch.from_numpy(values.numpy().argmax(axis=-1))  # ten times faster than torch's
    largest = values.gather(1, places[:, None])[:, 0]
    drawn = torch.nonzero(temperature > 0)[:, 0]
    if drawn.numel():
        places[drawn] = draw_tokens(
            values[drawn],
            temperature[drawn],
            seeds[drawn],
            positions[drawn],
            top=(top_k[drawn], top_p[drawn]),
            min_p=min_p[drawn],
        )
    return places, largest


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top: tuple[Tensor, Tensor],
    min_p: Tensor,
) -> Tensor:
    """Sample i64 [S] from logits f32 [S, V], on any device; ``temperature`` f32 [S], 0 takes the first of the
    largest; ``top``: k i64 [S], p f32 [S].
    """
    top_k, top_p = top
    threshold = topk_topp_threshold(
        logits, top_k.clamp(max=logits.shape[1]), top_p, temperature=temperature, min_p=min_p
    )
    return gumbel_sample(logits, temperature, seeds, positions, threshold=threshold)
