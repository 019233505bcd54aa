"""Top-k and top-p as a threshold: the smallest scaled logit that may still be sampled."""

import torch
from torch import Tensor

if torch.cuda.is_available():
    from quire_kernels.sampling.topk_topp_threshold_triton import topk_topp_threshold_triton

_CANDIDATES = 1024  # enough for almost every nucleus; flatter distributions are sorted as a whole


def topk_topp_threshold(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Thresholds f32 [B]: keep tokens with logits / temperature >= threshold; logits f32 [B, V].

    ``top_k`` i64 [B], 0 = off; ``top_p`` f32 [B], 1 = off. Top-p applies to the probability mass that top-k
    leaves. Ties at the threshold are all kept, so the result does not depend on a sorting order.
    ``temperature`` f32 [B]: 1 if None; a row of 0 takes its largest logit, and keeps all. ``min_p`` f32 [B],
    0 = off: also excludes tokens less probable than min_p times the most likely one.
    """
    if logits.is_cuda:
        return topk_topp_threshold_triton(logits, top_k, top_p, temperature=temperature, min_p=min_p, out=out)
    scaled, is_drawn = logits, None
    if temperature is not None:
        is_drawn = temperature > 0
        scaled = logits / temperature.where(is_drawn, 1.0)[:, None]
    thresholds = _on_cpu(scaled, top_k, top_p)
    if min_p is not None:  # p >= min_p * p_max in terms of logits; top-k and top-p do not change the ratio
        thresholds = torch.maximum(thresholds, scaled.amax(dim=-1) + min_p.log())
    if is_drawn is not None:
        thresholds = thresholds.where(is_drawn, float("-inf"))
    return thresholds if out is None else out.copy_(thresholds)


def _on_cpu(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    if scaled.shape[1] <= _CANDIDATES:
        return topk_topp_threshold_reference(scaled, top_k, top_p)
    # A fixed number of candidates, so that a row's arithmetic does not depend on the other rows.
    candidates = scaled.topk(_CANDIDATES, dim=-1).values
    thresholds, mass = _cut(candidates, scaled.logsumexp(dim=-1), top_k, top_p)
    short = (top_k > _CANDIDATES) | ((top_k == 0) & (top_p < 1) & (mass < top_p))
    if bool(short.any()):
        thresholds[short] = topk_topp_threshold_reference(scaled[short], top_k[short], top_p[short])
    return thresholds


def topk_topp_threshold_reference(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """By sorting everything."""
    return _cut(scaled.sort(dim=-1, descending=True).values, scaled.logsumexp(dim=-1), top_k, top_p)[0]


def _cut(candidates: Tensor, whole: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(threshold, mass of the candidates) from the sorted largest values; ``whole``: the row's logsumexp."""
    off = torch.full_like(whole, float("-inf"))
    width = candidates.shape[1]
    kth = candidates.gather(1, (top_k.clamp(1, width) - 1)[:, None])[:, 0]
    by_k = torch.where(top_k > 0, kth, off)
    kept = candidates.masked_fill(candidates < by_k[:, None], float("-inf"))
    total = torch.where(top_k > 0, kept.logsumexp(dim=-1), whole)
    probabilities = torch.exp(kept - total[:, None])
    before = probabilities.cumsum(dim=-1) - probabilities
    in_nucleus = (before < top_p[:, None]) & (kept > float("-inf"))
    in_nucleus[:, 0] = True
    smallest = kept.masked_fill(~in_nucleus, float("inf")).amin(dim=-1)
    return torch.where(top_p < 1, smallest, by_k), probabilities.sum(dim=-1)
