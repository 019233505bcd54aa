"""From logits to token ids, by the kernels. Called by ``runner.sampler``."""

from quire_kernels import gumbel_sample, token_logprobs, topk_topp_threshold

__all__ = ["gumbel_sample", "token_logprobs", "topk_topp_threshold"]
