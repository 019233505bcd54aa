"""What both kinds of completion requests have in common: how to sample, when to stop, how to deliver.

Called by `calls`, which has taken a route's own fields before. Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.api.fields import Fields
from quire_server.api.grammar_fields import check_form, parse_form
from quire_server.api.sampling_defaults import SamplingDefaults
from quire_server.api.sampling_fields import parse_sampling
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY
from quire_server.core.request import SamplingParams
from quire_server.text.grammar_compiler import Wanted

MAX_N = 16
MAX_STRINGS = 16
MAX_STRING_LENGTH = 256
MAX_TIMEOUT = 86_400.0
MAX_NAME = 256
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True)
class TextRules:
    """How the answer's tokens become text, and which strings end it."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string or token is a part of the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  # a stop string counts when a later token completes it
    weigh_stop: bool = False  # the stop token, though no text, has its log-probability too


@dataclass(frozen=True)
class Generation:
    """What is common to both kinds. ``sampling`` lacks what depends on the prompt, the tokenizer and the
    server, see `parse_sampling`.
    """

    model: str
    sampling: SamplingParams
    text: TextRules
    max_tokens: int | None
    bad_words: tuple[str, ...]
    watermark: bool | None  # None: as the server does by default
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool  # usage in every chunk, not only at the end
    cache_salt: str
    priority: int  # lower is more urgent, 0 is normal
    timeout: float | None  # seconds from arrival to the last token
    retry_on_timeout: bool  # once more with half of max_tokens, as long as nothing was sent
    cache_ttl: float  # seconds for which the prompt is pinned in the prefix cache, 0 for not at all
    form: Wanted | None  # what the answer has to look like


def parse_generation(
    fields: Fields,
    defaults: SamplingDefaults,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> Generation:
    """The common fields; the last step of parsing, since it refuses what is left."""
    model = fields.text("model", "", MAX_NAME)
    if not model:
        raise fields.error("model", "is required")
    sampling = parse_sampling(fields, defaults, vocab_size, logprobs)
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise fields.error("min_tokens", "is more than max_tokens")
    n = fields.integer("n", 1, 1, MAX_N) or 1
    stream = fields.boolean("stream", default=False)
    if sampling.prompt_logprobs is not None and (stream or n > 1):
        raise fields.error("prompt_logprobs", "is not supported together with stream or n")
    fields.text("user", "", MAX_NAME)  # for the client's own records; nothing here depends on it
    include_usage, continuous_usage = _stream_usage(fields, stream)
    generation = Generation(
        model=model,
        sampling=sampling,
        text=_text_rules(fields, sampling.min_tokens),
        max_tokens=max_tokens,
        bad_words=_strings(fields, "bad_words"),
        watermark=_watermark(fields),
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache_salt=fields.text("cache_salt", "", MAX_NAME),
        priority=_priority(fields),
        timeout=_timeout(fields),
        retry_on_timeout=fields.boolean("retry_on_timeout", default=False),
        cache_ttl=_cache_ttl(fields),
        form=parse_form(fields),
    )
    check_form(generation.form, ignore_eos=sampling.ignore_eos)
    fields.end()
    return generation


def _text_rules(fields: Fields, min_tokens: int) -> TextRules:
    return TextRules(
        stop=_strings(fields, "stop"),
        include_stop=fields.boolean("include_stop_str_in_output", default=False),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        min_tokens=min_tokens,
    )


def _strings(fields: Fields, name: str) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = fields.take(name)
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STRINGS:
        raise fields.error(name, f"must be a string or a list of at most {MAX_STRINGS} strings")
    if not all(isinstance(one, str) and 0 < len(one) <= MAX_STRING_LENGTH for one in strings):
        raise fields.error(name, f"must hold strings of 1 to {MAX_STRING_LENGTH} characters")
    return tuple(strings)


def _watermark(fields: Fields) -> bool | None:
    value = fields.take("watermark")
    if value is not None and not isinstance(value, bool):
        raise fields.error("watermark", "must be true or false")
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


def _cache_ttl(fields: Fields) -> float:
    """Explicit prompt caching, in Anthropic's words: {"type": "ephemeral", "ttl": "5m"}."""
    control = fields.inner("cache_control")
    if control is None:
        return 0.0
    if control.take("type") != "ephemeral":
        raise control.error("type", 'must be "ephemeral"')
    ttl = control.text("ttl", "5m", MAX_NAME)
    if ttl not in CACHE_TTLS:
        raise control.error("ttl", f"must be one of {', '.join(CACHE_TTLS)}")
    control.end()
    return CACHE_TTLS[ttl]


def _stream_usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether every chunk before tells it, too."""
    options = fields.inner("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise fields.error("stream_options", "needs stream to be true")
    include = options.boolean("include_usage", default=False)
    continuous = options.boolean("continuous_usage_stats", default=False)
    options.only("include_obfuscation", (False,))
    options.end()
    return include or continuous, continuous
