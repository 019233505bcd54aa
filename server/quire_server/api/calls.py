"""The two kinds of completion requests, parsed once on entry into frozen objects.

Called by `completions`. Says which fields exist, which values they may have, and which ones are accepted
only where they change nothing. Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.api.chat_messages import parse_messages
from quire_server.api.errors import bad_field
from quire_server.api.fields import INT64, Fields, is_token_ids
from quire_server.api.grammar_fields import check_form, parse_form
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY
from quire_server.text.grammar_compiler import Wanted

MAX_N = 16
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
CHARACTERS_PER_TOKEN = 4
MAX_TIMEOUT = 86_400.0
_MAX_NAME = 256
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions

# Known fields that this server does not implement, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
_NEUTRAL_CHAT: dict[str, tuple[object, ...]] = {
    **_NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_NEUTRAL_COMPLETION: dict[str, tuple[object, ...]] = {**_NEUTRAL, "best_of": (1,), "suffix": ("",)}
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
    form: Wanted | None  # what the answer has to look like


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions."""

    messages: tuple[dict[str, str], ...]
    generation: Generation

    @property
    def rough_tokens(self) -> int:
        """Prompt tokens of all answers, about: nothing is tokenised yet."""
        characters = sum(len(message["content"]) for message in self.messages)
        return characters // CHARACTERS_PER_TOKEN * self.generation.n


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions; each prompt is text or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    generation: Generation

    @property
    def rough_tokens(self) -> int:
        """As of ChatCall."""
        texts = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        ids = sum(len(prompt) for prompt in self.prompts if not isinstance(prompt, str))
        return (texts // CHARACTERS_PER_TOKEN + ids) * self.generation.n


def parse_chat(body: dict[str, object], defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """A chat request from its JSON object. Raises ApiError."""
    fields = Fields(body)
    messages = parse_messages(fields)
    wanted = fields.boolean("logprobs", default=False)
    top = fields.integer("top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise fields.error("top_logprobs", "needs logprobs to be true")
    long_name = fields.integer("max_completion_tokens", None, 1, INT64)
    max_tokens = fields.integer("max_tokens", long_name, 1, INT64)
    if long_name is not None and max_tokens != long_name:
        raise fields.error("max_tokens", "contradicts max_completion_tokens; send one of them")
    for name, allowed in _NEUTRAL_CHAT.items():
        fields.only(name, allowed)
    logprobs = (top or 0) if wanted else None
    return ChatCall(messages, _generation(fields, defaults, vocab_size, max_tokens, logprobs))


def parse_completion(body: dict[str, object], defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """A completion request from its JSON object. Raises ApiError."""
    fields = Fields(body)
    prompts = _prompts(fields, vocab_size)
    echo = fields.boolean("echo", default=False)
    logprobs = fields.integer("logprobs", None, 0, MAX_LOGPROBS)
    if echo and logprobs is not None:
        raise fields.error("logprobs", "is not supported together with echo")
    max_tokens = fields.integer("max_tokens", _COMPLETION_MAX_TOKENS, 1, INT64)
    for name, allowed in _NEUTRAL_COMPLETION.items():
        fields.only(name, allowed)
    generation = _generation(fields, defaults, vocab_size, max_tokens, logprobs)
    if len(prompts) * generation.n > MAX_CHOICES:
        raise bad_field(
            "n", f"{len(prompts)} prompts times {generation.n} answers are more than {MAX_CHOICES}"
        )
    return CompletionCall(prompts, echo, generation)


def _prompts(fields: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    value = fields.take("prompt")
    if isinstance(value, str):
        return (value,)
    wrong = fields.error("prompt", "must be a string, a list of strings, or a list of token ids of the model")
    if not isinstance(value, list) or not value:
        raise wrong
    if is_token_ids(value, vocab_size):
        return (tuple(value),)
    if len(value) > MAX_CHOICES:
        raise fields.error("prompt", f"must have at most {MAX_CHOICES} prompts")
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if isinstance(item, list) and item and is_token_ids(item, vocab_size):
            prompts.append(tuple(item))
        elif isinstance(item, str):
            prompts.append(item)
        else:
            raise wrong
    return tuple(prompts)


def _generation(
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
        form=parse_form(fields),
    )
    check_form(generation.form, ignore_eos=generation.ignore_eos)
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
