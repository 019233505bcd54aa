"""The health canary: a fixed prompt, decoded greedily at warm-up, which must give the same tokens ever after.

It runs once before serving, then whenever the engine has been idle for a while. Ten equal tokens mean that
weights, KV cache, kernels and sampler still work. It runs alone in its batch, because the other rows of a
batch could change the last bits of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams

_PROMPT_LENGTH = 5
_NUM_TOKENS = 10


@dataclass(frozen=True)
class Canary:
    """The canary of one model. Prompt and answer are shorter than a KV block, so nothing of it is cached."""

    prompt: tuple[int, ...]
    num_tokens: int

    @classmethod
    def for_model(cls, vocab_size: int, max_model_len: int) -> Canary:
        """Token ids spread evenly over the vocabulary, which needs no tokenizer."""
        length = min(_PROMPT_LENGTH, max_model_len - 1)
        prompt = tuple(vocab_size * (i + 1) // (length + 1) for i in range(length))
        return cls(prompt, min(_NUM_TOKENS, max_model_len - length))

    def request(self, number: int, now: float) -> Request:
        """The request of one run; its own cache salt prevents prefix hits."""
        name = f"canary-{number}"
        sampling = SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        return Request(name, self.prompt, sampling, arrival=now, priority=TOP_PRIORITY, cache_salt=name)
