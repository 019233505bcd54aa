"""What all routes that generate share: the fields of their bodies, and the frozen settings made of them.

A route's own module has its messages or prompts and its own names of fields; what an answer is generated with
is here once. Pure: no tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from quire_http.errors import bad_field
from quire_server.api.protocol.sampling import SamplingFields
from quire_server.api.protocol.structured_outputs import (
    ResponseFormat,
    StructuredOutputs,
    wanted_form,
)
from quire_server.api.protocol.validation import (
    Boolean,
    Integer,
    Json,
    Labels,
    Neutral,
    Number,
    OneOf,
    RequestModel,
    Strings,
    Text,
    TokenIds,
    wrong,
)
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY
from quire_server.core.sampling_params import INT64_MAX, SamplingParams
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.grammar_compiler import GrammarRequest

MAX_N = 16
MAX_NAME = 256
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
MAX_RESUMED_TOKENS = 1 << 20
MAX_STRINGS = 16
MAX_STRING_LENGTH = 256
NAME_OF_MODEL = Field(description="A name from /v1/models.")
_MAX_TIMEOUT = 86_400.0
_BAD_WORD = r"\S"


@dataclass(frozen=True)
class TextRules:
    """How the answer's tokens become text, and which strings end it."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string or token is a part of the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  # a stop string counts when a later token completes it
    logprob_of_stop: bool = False  # the stop token, though no text, has its log-probability too
    shown: tuple[int, ...] = ()  # special tokens that are text all the same


@dataclass(frozen=True)
class Generation:
    """What all kinds of requests ask for. ``sampling`` lacks what depends on the prompt, the tokenizer and
    the server, see `SamplingFields.sampling_params`.
    """

    model: str
    sampling: SamplingParams
    text: TextRules
    max_tokens: int | None
    bad_words: tuple[str, ...]
    watermark: bool | None  # None: as the server does by default
    stream: bool
    cache_salt: str
    priority: int  # lower is more urgent, 0 is normal
    timeout: float | None  # seconds from arrival to the last token
    form: GrammarRequest | None  # the structured output
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False  # usage in every chunk, not only at the end
    retry_on_timeout: bool = False  # once more with half of max_tokens, as long as nothing was sent
    cache_ttl: float = 0.0  # seconds for which the prompt is pinned in the prefix cache, 0 for not at all
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class PriorityLevel:
    """A class of priority or a level."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        level = {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}
        return {"anyOf": [{"enum": list(CLASSES)}, level]}

    def _check(self, value: object) -> int:
        if isinstance(value, str) and value in CLASSES:
            return CLASSES[value]
        if type(value) is not int or not MIN_PRIORITY <= value <= MAX_PRIORITY:
            classes = ", ".join(CLASSES)
            bounds = f"{MIN_PRIORITY} (most urgent) and {MAX_PRIORITY}"
            raise wrong(f"must be {classes}, or an integer between {bounds}")
        return value


class StreamOptions(RequestModel):
    """OpenAI's ``stream_options``."""

    include_usage: Annotated[
        bool, Boolean(), Field(description="Whether the stream ends with token counts.")
    ] = False
    continuous_usage_stats: Annotated[
        bool, Boolean(), Field(description="Whether every chunk has the token counts so far, too.")
    ] = False
    include_obfuscation: Annotated[object, Neutral((False,))] = None


class CacheControl(RequestModel):
    """Explicit prompt caching, under Anthropic's names."""

    type: Annotated[str, OneOf(("ephemeral",))]
    ttl: Annotated[str, OneOf(tuple(CACHE_TTLS)), Field(description="How long it is kept.")] = "5m"


class Resume(RequestModel):
    """Where an answer that another server has begun goes on."""

    id: Annotated[str, Text(MAX_NAME, required=True), Field(description="The id of the answer's chunks.")]
    created: Annotated[int, Integer(0, INT64_MAX), Field(description="Their time.")]
    token_ids: Annotated[
        tuple[int, ...],
        TokenIds(MAX_RESUMED_TOKENS),
        Field(description="The answer's tokens so far, as the comments of its stream have them."),
    ]


class EngineRequest(SamplingFields):
    """The fields that mean the same whatever the API is: OpenAI's, Anthropic's, or ours."""

    model: Annotated[str, Text(MAX_NAME, required=True), NAME_OF_MODEL]
    stream: Annotated[
        bool, Boolean(), Field(description="Whether to send the answer as server-sent events.")
    ] = False
    bad_words: Annotated[
        tuple[str, ...],
        Strings(MAX_STRINGS, MAX_STRING_LENGTH, _BAD_WORD),
        Field(description="Strings that the answer shall not contain."),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Boolean(), Field(description="Whether the stop string is a part of the answer.")
    ] = False
    skip_special_tokens: Annotated[
        bool, Boolean(), Field(description="Whether special tokens are left out of the text.")
    ] = True
    cache_salt: Annotated[
        str,
        Text(MAX_NAME),
        Field(description="Cached prefixes are shared only with requests of equal salt."),
    ] = ""
    priority: Annotated[
        int,
        PriorityLevel(),
        Field(
            description="Lower goes first; needs `--scheduling-policy priority`, and a key that may use it."
        ),
    ] = CLASSES["normal"]
    timeout: Annotated[
        float | None,
        Number(0, _MAX_TIMEOUT, above_low=True),
        Field(description="Seconds from arrival to the last token."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The form of the answer, in vLLM's words.")
    ] = None

    def engine_generation(
        self,
        defaults: SamplingDefaults,
        vocab_size: int,
        max_tokens: int | None,
        *,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        form: GrammarRequest | None = None,
        cache_ttl: float = 0.0,
    ) -> Generation:
        """One answer by these fields. ``form``: by a field of the API's own. Raises ApiError."""
        sampling = self.sampling_params(defaults, vocab_size, logprobs)
        if max_tokens is not None and sampling.min_tokens > max_tokens:
            raise bad_field("min_tokens", "is more than max_tokens")
        return Generation(
            model=self.model,
            sampling=sampling,
            text=TextRules(
                stop=stop,
                include_stop=self.include_stop_str_in_output,
                skip_special_tokens=self.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            ),
            max_tokens=max_tokens,
            bad_words=self.bad_words,
            watermark=self.watermark,
            stream=self.stream,
            cache_salt=self.cache_salt,
            priority=self.priority,
            timeout=self.timeout,
            form=wanted_form(form, self.structured_outputs, ignore_eos=sampling.ignore_eos),
            cache_ttl=cache_ttl,
        )


class GenerationRequest(EngineRequest):
    """What both of OpenAI's kinds of completions share besides."""

    n: Annotated[int, Integer(1, MAX_N), Field(description="How many answers.")] = 1
    stream_options: Annotated[StreamOptions | None, Field(description="Only with `stream`.")] = None
    stop: Annotated[
        tuple[str, ...],
        Strings(MAX_STRINGS, MAX_STRING_LENGTH),
        Field(description="Strings that end the answer."),
    ] = ()
    user: Annotated[str, Text(MAX_NAME), Field(description="For the client's own records.")] = ""
    cache_control: Annotated[
        CacheControl | None, Field(description="Keeps the prompt in the prefix cache.")
    ] = None
    retry_on_timeout: Annotated[
        bool,
        Boolean(),
        Field(description="Whether to try once more, for half of the tokens, if nothing was sent in time."),
    ] = False
    resume: Annotated[
        Resume | None,
        Field(description="Goes on with an answer of another server; needs `stream`, and one answer."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="The form of the answer, in OpenAI's words.")
    ] = None
    service_tier: Annotated[object, Neutral(("auto", "default"))] = None
    store: Annotated[object, Neutral((False,))] = None
    metadata: Annotated[
        dict[str, str],
        Labels(16, 512, 64),
        Field(description="For the client's own records; not kept."),
    ] = {}
    spaces_between_special_tokens: Annotated[object, Neutral((True,))] = None

    def generation(
        self, defaults: SamplingDefaults, vocab_size: int, max_tokens: int | None, logprobs: int | None
    ) -> Generation:
        """The common part of a call. Raises ApiError."""
        form = None if self.response_format is None else self.response_format.wanted()
        generation = self.engine_generation(
            defaults,
            vocab_size,
            max_tokens,
            stop=self.stop,
            logprobs=logprobs,
            form=form,
            cache_ttl=0.0 if self.cache_control is None else CACHE_TTLS[self.cache_control.ttl],
        )
        sampling = generation.sampling
        if sampling.prompt_logprobs is not None and (self.stream or self.n > 1):
            raise bad_field("prompt_logprobs", "is not supported together with stream or n")
        if self.resume is not None and (not self.stream or self.n > 1):
            raise bad_field("resume", "needs stream to be true, and n to be 1")
        if self.resume is not None and sampling.logprobs is not None:
            raise bad_field("resume", "is not supported together with logprobs")
        options = self.stream_options or StreamOptions()
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "needs stream to be true")
        return replace(
            generation,
            n=self.n,
            include_usage=options.include_usage or options.continuous_usage_stats,
            continuous_usage=options.continuous_usage_stats,
            retry_on_timeout=self.retry_on_timeout and self.resume is None,
            resume=self.resume,
        )
