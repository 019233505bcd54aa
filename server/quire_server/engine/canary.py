"""The health canary: a fixed prompt, decoded greedily at warm-up, which must give the same tokens ever after.

It runs once before serving, then whenever `proof` says. Ten equal tokens mean that weights, KV cache,
kernels and sampler still work. It runs alone in its batch, because the other rows of a batch could change the
last bits of its logits. Where a model embeds texts, numbers of the prompt's vector take the place of tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from quire_server.core.policy import TOP_PRIORITY
from quire_server.core.request import PoolingParams, Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, StepEvents
from quire_server.engine.proof import Outcome

_PROMPT_LENGTH = 5
_NUM_TOKENS = 10
_MAX_NUMBERS = 32  # of a vector
#: One of a vector's numbers in units of a thousandth, as an integer from 0 on: they are between -1 and 1.
_UNIT, _ZERO = 1000, 100_000
#: By how many units a number may differ: the same arithmetic may sum in another order.
_TOLERANCE = 10


@dataclass(frozen=True)
class Canary:
    """The canary of one model. Prompt and answer are shorter than a KV block, so nothing of it is cached."""

    prompt: tuple[int, ...]
    num_tokens: int
    pools: bool = False

    @classmethod
    def for_model(cls, vocab_size: int, max_model_len: int, *, pools: bool = False) -> Canary:
        """Token ids spread evenly over the vocabulary, which needs no tokenizer."""
        length = min(_PROMPT_LENGTH, max_model_len - 1)
        prompt = tuple(vocab_size * (i + 1) // (length + 1) for i in range(length))
        return cls(prompt, 1 if pools else min(_NUM_TOKENS, max_model_len - length), pools)

    def request(self, number: int, now: float) -> Request:
        """The request of one run; its own cache salt prevents prefix hits."""
        name = f"canary-{number}"
        sampling = SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        pooling = PoolingParams() if self.pools else None
        return Request(
            name,
            self.prompt,
            sampling,
            arrival=now,
            priority=TOP_PRIORITY,
            cache_salt=name,
            pooling=pooling,
        )


@dataclass
class CanaryRun:
    """One run of the canary, while the engine computes it."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False
    tolerance: int = 0

    def take(self, events: StepEvents) -> None:
        """Its part of a step's result."""
        for event in events:
            if event.request_id == self.request_id:
                self.tokens += vector_numbers(event.pooled) if event.pooled else event.token_ids
                self.tolerance = _TOLERANCE if event.pooled else 0
                self.error = event.error
                self.is_complete = event.finish_reason is not None

    def outcome(self, tokens: tuple[int, ...], expected: tuple[int, ...]) -> Outcome:
        """Of a complete run. An error is inconclusive, unless the logits were NaN."""
        if self.error is not None:
            return Outcome.WRONG if self.error == NOT_FINITE else Outcome.INCONCLUSIVE
        is_right = len(tokens) == len(expected) and all(
            abs(one - other) <= self.tolerance for one, other in zip(tokens, expected, strict=True)
        )
        return Outcome.RIGHT if is_right else Outcome.WRONG


def vector_numbers(vector: bytes) -> tuple[int, ...]:
    """Up to 32 numbers of a vector (f32, little-endian), spread over it, as integers from 0 on."""
    numbers = struct.unpack(f"<{len(vector) // 4}f", vector)
    every = -(-len(numbers) // _MAX_NUMBERS)
    return tuple(max(0, round(number * _UNIT) + _ZERO) for number in numbers[::every])
