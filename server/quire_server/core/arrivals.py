"""From a request to a waiting sequence: its place in the order, its seed, its limits.

Called by the scheduler when a request arrives, when it has to wait again, and when an answer ends, which
teaches how long answers are.
"""

import hashlib
from collections.abc import Collection

from quire_server.core import policy
from quire_server.core.answer_length import AnswerLengths
from quire_server.core.limits import SchedulerConfig
from quire_server.core.prefix_chain import PrefixChain
from quire_server.core.request import Request
from quire_server.core.sequence import Sequence


class Arrivals:
    """Numbers arrivals, so that the order is total: first by virtual arrival, then by number."""

    def __init__(self, config: SchedulerConfig, eos_token_ids: Collection[int]) -> None:
        self._config = config
        self._eos_ids = frozenset(eos_token_ids)
        self._lengths = AnswerLengths()
        self._count = 0

    def sequence(self, request: Request) -> Sequence:
        """A waiting sequence for a request that was found to fit."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        self._count += 1
        expected = self._lengths.expect(len(prompt), sampling.max_tokens)
        eos_ids = frozenset[int]() if sampling.ignore_eos else self._eos_ids
        return Sequence(
            request=request,
            order=(policy.virtual_arrival(self._config.policy, request, expected), self._count),
            seed=self._drawn(request.request_id) if sampling.seed is None else sampling.seed,
            stop_ids=eos_ids.union(sampling.stop_token_ids),
            max_total=min(len(prompt) + sampling.max_tokens, self._config.max_model_len),
            # With a grammar the runner offers no stop token too early, and one that it has to offer counts.
            min_total=len(prompt) + (sampling.min_tokens if sampling.grammar is None else 0),
            tokens=list(prompt),
            chain=PrefixChain(request.cache_salt),
            num_to_report=0 if sampling.prompt_logprobs is None else len(prompt) - 1,
        )

    def interrupted(self, sequence: Sequence) -> None:
        """A sequence lost its row and is about to wait again: what it has said by now is the least that its
        answer can be, so one that was expected to be shorter moves back to where it belongs.
        """
        sequence.num_preemptions += 1
        request, (arrival, number) = sequence.request, sequence.order
        so_far = len(sequence.tokens) - len(request.prompt_token_ids)
        sequence.order = max(arrival, policy.virtual_arrival(self._config.policy, request, so_far)), number

    def answered(self, sequence: Sequence) -> None:
        """The answer of a sequence ended by itself."""
        num_prompt_tokens = len(sequence.request.prompt_token_ids)
        length = len(sequence.tokens) - num_prompt_tokens
        self._lengths.learn(num_prompt_tokens, sequence.request.sampling.max_tokens, length)

    def _drawn(self, request_id: str) -> int:
        """A seed for a request that brings none: its own, and the same in every run."""
        digest = hashlib.sha256(f"{self._config.seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)
