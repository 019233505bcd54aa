"""Log-probabilities of the sampled tokens and of the most likely ones."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob f32 [B] of token_ids i64 [B], top values f32 [B, num_top], top ids i64 [B, num_top])."""
    return token_logprobs_reference(logits, token_ids, num_top)


def token_logprobs_reference(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax in float32, the most likely tokens first."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, token_ids[:, None])[:, 0], top.values, top.indices
