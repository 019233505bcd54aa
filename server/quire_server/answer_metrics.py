"""What each answer cost, in the names and buckets that vLLM's dashboards read: where its time went (queue,
prefill, decode), how long prompt and answer were, what was asked for.

Held by ``metrics``. Made once the engine has said how long a context can be: the buckets of token counts end
there.
"""

from __future__ import annotations

from quire_server.core.timing import Timing
from quire_server.labelled_metrics import VLLM_REQUEST_SECONDS, Exemplar, Labelled, one_two_five

_N = (1, 2, 5, 10, 20)


class AnswerMetrics:
    """Histograms over answers; an answer is one prompt and one choice."""

    def __init__(self, vllm: Labelled, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)

        def seconds(part: str, about: str) -> tuple[str, str, tuple[float, ...]]:
            return f"vllm:request_{part}_time_seconds", about, VLLM_REQUEST_SECONDS

        self._queue = vllm.histogram(*seconds("queue", "Arrival at the engine to the last start."))
        self._prefill = vllm.histogram(*seconds("prefill", "Last start to the first token."))
        self._decode = vllm.histogram(*seconds("decode", "First token to the last one."))
        self._inference = vllm.histogram(*seconds("inference", "Last start to the last token."))
        self._prompt = vllm.histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._generated = vllm.histogram("vllm:request_generation_tokens", "Tokens of an answer.", tokens)
        self._most_generated = vllm.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest answer to a request.", tokens
        )
        self._max_tokens = vllm.histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", tokens
        )
        self._n = vllm.histogram("vllm:request_params_n", "n of a request.", _N)

    def asked(self, n: int, max_tokens: int) -> None:
        """A request went to the engine, with at most ``max_tokens`` for each answer."""
        self._n.observe(n)
        self._max_tokens.observe(max_tokens)

    def finished(self, prompt_tokens: int, tokens: int, timing: Timing, exemplar: Exemplar | None) -> None:
        """An answer ended by itself; ``timing`` is complete."""
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        if timing.finished is None:
            return
        self._queue.observe(timing.scheduled - timing.queued, exemplar)
        self._prefill.observe(timing.first_token - timing.scheduled, exemplar)
        self._decode.observe(timing.finished - timing.first_token, exemplar)
        self._inference.observe(timing.finished - timing.scheduled, exemplar)

    def longest(self, tokens: int) -> None:
        """All answers to a request have ended; the longest has so many tokens."""
        self._most_generated.observe(tokens)
