"""What both kinds of completion requests have in common: how to sample, when to stop, how to deliver.

Called by `calls`, which has taken a route's own fields before. Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.api.fields import INT64, Fields
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY

MAX_N = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
MAX_TIMEOUT = 86_400.0
_MAX_NAME = 256
_CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True)
class SamplingDefaults:
    """What the model's generation_config.json says about sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Generation:
    """What is common to both kinds: how to sample, when to stop, how to deliver."""

    model: str
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    logprobs: int | None  # number of alternatives, None for no log-probabilities
    stream: bool
    include_usage: bool
    cache_salt: str
    priority: int  # lower is more urgent, 0 is normal
    timeout: float | None  # seconds from arrival to the last token
    cache_ttl: float  # seconds for which the prompt is pinned in the prefix cache, 0 for not at all


def parse_generation(
    fields: Fields,
    defaults: SamplingDefaults,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> Generation:
    """The common fields; the last step of parsing, since it refuses what is left."""
    model = fields.text("model", "", _MAX_NAME)
    if not model:
        raise fields.error("model", "is required")
    stream = fields.boolean("stream", default=False)
    stop = _stop(fields)
    min_tokens = fields.integer("min_tokens", 0, 0, INT64) or 0
    if min_tokens and stop:
        raise fields.error("min_tokens", "is not supported together with stop")
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.error("min_tokens", "is more than max_tokens")
    top_k = fields.integer("top_k", defaults.top_k, -1, INT64) or 0
    fields.text("user", "", _MAX_NAME)  # for the client's own records; nothing here depends on it
    generation = Generation(
        model=model,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=_top_p(fields, defaults.top_p),
        top_k=min(max(top_k, 0), vocab_size),
        seed=fields.integer("seed", None, -INT64, INT64 - 1),
        stop=stop,
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_TOKENS, vocab_size),
        ignore_eos=fields.boolean("ignore_eos", default=False),
        n=fields.integer("n", 1, 1, MAX_N) or 1,
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        cache_salt=fields.text("cache_salt", "", _MAX_NAME),
        priority=_priority(fields),
        timeout=_timeout(fields),
        cache_ttl=_cache_ttl(fields),
    )
    fields.end()
    return generation


def _top_p(fields: Fields, default: float) -> float:
    value = fields.number("top_p", default, 0.0, 1.0)
    if value == 0:
        raise fields.error("top_p", "must be more than 0")
    return value


def _priority(fields: Fields) -> int:
    value = fields.take("priority")
    if value is None:
        return CLASSES["normal"]
    if isinstance(value, str) and value in CLASSES:
        return CLASSES[value]
    if type(value) is not int or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        classes = ", ".join(CLASSES)
        raise fields.error(
            "priority",
            f"must be {classes}, or an integer between {MIN_PRIORITY} (most urgent) and {MAX_PRIORITY}",
        )
    return value


def _timeout(fields: Fields) -> float | None:
    value = fields.number("timeout", -1.0, 0.0, MAX_TIMEOUT)
    if value == 0:
        raise fields.error("timeout", "must be more than 0 seconds")
    return None if value < 0 else value


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise fields.error("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise fields.error("stop", f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _cache_ttl(fields: Fields) -> float:
    """Explicit prompt caching, in Anthropic's words: {"type": "ephemeral", "ttl": "5m"}."""
    control = fields.inner("cache_control")
    if control is None:
        return 0.0
    if control.take("type") != "ephemeral":
        raise control.error("type", 'must be "ephemeral"')
    ttl = control.text("ttl", "5m", _MAX_NAME)
    if ttl not in _CACHE_TTLS:
        raise control.error("ttl", f"must be one of {', '.join(_CACHE_TTLS)}")
    control.end()
    return _CACHE_TTLS[ttl]


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.error("stream_options", "needs stream to be true")
    include = options.boolean("include_usage", default=False)
    options.only("include_obfuscation", (False,))
    options.end()
    return include
