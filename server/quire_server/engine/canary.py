"""The health canary: a fixed prompt, decoded greedily at warm-up, which must give the same tokens ever after.

It runs once before serving, then whenever `proof` says. Ten equal tokens mean that weights, KV cache,
kernels and sampler still work. It runs alone in its batch, because the other rows of a batch could change the
last bits of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, StepEvents
from quire_server.engine.proof import Outcome

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


@dataclass
class CanaryRun:
    """One run of the canary, while the engine computes it."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False

    def take(self, events: StepEvents) -> None:
        """Its part of a step's result."""
        for event in events:
            if event.request_id == self.request_id:
                self.tokens += event.token_ids
                self.error = event.error
                self.is_complete = event.finish_reason is not None

    def outcome(self, tokens: tuple[int, ...], expected: tuple[int, ...]) -> Outcome:
        """Of a complete run. An error is inconclusive, unless the logits were NaN."""
        if self.error is not None:
            return Outcome.WRONG if self.error == NOT_FINITE else Outcome.INCONCLUSIVE
        return Outcome.RIGHT if tokens == expected else Outcome.WRONG
