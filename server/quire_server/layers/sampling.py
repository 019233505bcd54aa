"""From logits to token ids, by the kernels. Called by ``runner.sampler``."""

from quire_kernels import (
    apply_penalties,
    apply_token_bitmask,
    gumbel_sample,
    token_logprobs,
    topk_topp_threshold,
)

__all__ = ["apply_penalties", "apply_token_bitmask", "gumbel_sample", "token_logprobs", "topk_topp_threshold"]
