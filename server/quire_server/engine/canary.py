"""Proof of inference: the engine answers a fixed prompt greedily at warm-up, and must give the same tokens
later.

Called by `loop`: once before serving, then whenever nothing has proved the engine for a while. Ten right
tokens mean that weights, KV cache, kernels and sampler still do what they did. It runs alone (the loop
takes no other work meanwhile), so a batch neighbour can never change a last bit and with it the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import Request, SamplingParams

_PROMPT_LENGTH = 5
_NUM_TOKENS = 10


@dataclass(frozen=True)
class Canary:
    """The prompt of one model. With its answer it stays below a KV block: nothing enters the cache."""

    prompt: tuple[int, ...]
    num_tokens: int

    @classmethod
    def for_model(cls, vocab_size: int, max_model_len: int) -> Canary:
        """Token ids spread over the vocabulary: no tokenizer needed."""
        length = min(_PROMPT_LENGTH, max_model_len - 1)
        prompt = tuple(vocab_size * (i + 1) // (length + 1) for i in range(length))
        return cls(prompt, min(_NUM_TOKENS, max_model_len - length))

    def request(self, number: int, now: float) -> Request:
        """The request of one run; the salt keeps it from being answered out of the prefix cache."""
        name = f"canary-{number}"
        sampling = SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        return Request(name, self.prompt, sampling, arrival=now, priority=TOP_PRIORITY, cache_salt=name)
