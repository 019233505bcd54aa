"""The fields that say how a token is chosen, parsed into the engine's SamplingParams.

Called by `generation_fields`. Names and meanings are OpenAI's and vLLM's; docs/sampling.md lists them with
their bounds. Pure.
"""

from __future__ import annotations

from quire_server.api.fields import INT64, Fields
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.core.request import SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_STOP_TOKENS = 64
MAX_ALLOWED_TOKENS = 4096
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0  # nearer to 0, logits become infinite


def parse_sampling(
    fields: Fields, defaults: SamplingDefaults, vocab_size: int, logprobs: int | None
) -> SamplingParams:
    """All but ``max_tokens``, ``bad_words`` and ``watermark``, which depend on more than the request."""
    top_k = fields.integer("top_k", defaults.top_k, -1, INT64) or 0
    return SamplingParams(
        max_tokens=0,
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=_positive(fields, "top_p", defaults.top_p, 1.0),
        top_k=min(max(top_k, 0), vocab_size),
        min_p=fields.number("min_p", defaults.min_p, 0.0, 1.0),
        seed=fields.integer("seed", None, -INT64, INT64 - 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=fields.number(
            "repetition_penalty",
            defaults.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        logit_bias=_logit_bias(fields, vocab_size),
        allowed_token_ids=_allowed(fields, vocab_size),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKENS, vocab_size),
        ignore_eos=fields.boolean("ignore_eos", default=False),
        min_tokens=fields.integer("min_tokens", 0, 0, INT64) or 0,
        logprobs=logprobs,
        prompt_logprobs=fields.integer("prompt_logprobs", None, 0, MAX_LOGPROBS),
    )


def _positive(fields: Fields, name: str, default: float, high: float) -> float:
    value = fields.number(name, default, 0.0, high)
    if value == 0:
        raise fields.error(name, "must be more than 0")
    return value


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value = fields.take("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise fields.error("logit_bias", f"must be an object of at most {MAX_LOGIT_BIAS} token ids")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10) or int(key) >= vocab_size:
            raise fields.error("logit_bias", f"has a name that is no token id in 0..{vocab_size - 1}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise fields.error(
                "logit_bias", f"must have numbers between {-MAX_BIAS:g} and {MAX_BIAS:g} as values"
            )
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def _allowed(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.take("allowed_token_ids")
    if value is None:
        return ()
    if not value:
        raise fields.error("allowed_token_ids", "must not be empty: no token could be chosen")
    again = Fields({"allowed_token_ids": value})
    return again.integers("allowed_token_ids", MAX_ALLOWED_TOKENS, vocab_size)
