"""Attention with soft-capped scores (Gemma 2), which torch's fused attention does not support."""

import torch
from torch import Tensor


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """q [B, H, M, D], k and v [B, H, N, D] -> [B, H, M, D]; scores become softcap * tanh(scores / softcap).

    ``mask`` is added to the capped scores, broadcast to [B, H, M, N]; None means causal, with M = N.
    """
    scores = capped_scores(q.float() @ k.float().transpose(2, 3) * scale, softcap)
    if mask is None:
        mask = torch.full(scores.shape[2:], float("-inf"), device=q.device).triu_(1)
    return (torch.softmax(scores.add_(mask), dim=-1) @ v.float()).to(q.dtype)


def capped_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Apply the soft cap in place; None leaves the scores as they are."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)
