"""The bodies of requests: what each route takes, and the frozen call that the server works with.

A body is validated twice: by its model, which /openapi.json shows, and by `to_call`, which compares fields
with one another. ``vocab_size`` bounds token ids; it is known once the engine is connected. Pure: no
tokenizer, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, core_schema

from quire_http.errors import bad_field
from quire_http.exchange import MAX_BODY_BYTES
from quire_server.api.protocol.sampling import MAX_LOGPROBS, SamplingFields
from quire_server.api.protocol.structured_outputs import (
    ResponseFormat,
    StructuredOutputs,
    closed,
    wanted_form,
)
from quire_server.api.protocol.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    ToolUse,
    tool_use,
)
from quire_server.api.protocol.validation import (
    TOKEN,
    Boolean,
    Integer,
    Json,
    Labels,
    ListOf,
    Neutral,
    Number,
    OneOf,
    RequestModel,
    Strings,
    Text,
    TokenIds,
    Vocabulary,
    explained,
    is_token_ids,
    validate,
    wrong,
)
from quire_server.core.policy import CLASSES, MAX_PRIORITY, MIN_PRIORITY
from quire_server.core.sampling_params import INT64_MAX, GrammarKind, SamplingParams
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.grammar_compiler import GrammarRequest

MAX_CHOICES = 64
MAX_N = 16
MAX_NAME = 256
MAX_MESSAGES = 4096
CHARACTERS_PER_TOKEN = 4
#: Tokens that /tokenize and /detokenize take, where the model's context is shorter.
MAX_TEXT_TOKENS = 1 << 17
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
CACHE_TTLS = {"5m": 300.0, "1h": 3600.0}
MAX_RESUMED_TOKENS = 1 << 20
_MAX_STRINGS = 16
_MAX_STRING_LENGTH = 256
_MAX_TIMEOUT = 86_400.0
_PROMPT = "must be a string, a list of strings, or a list of token ids of the model"

Prompts = tuple[str | tuple[int, ...], ...]


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
    """What both kinds of completion ask for. ``sampling`` lacks what depends on the prompt, the tokenizer and
    the server, see `SamplingFields.sampling_params`.
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
    form: GrammarRequest | None  # the structured output
    resume: Resume | None = None


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions."""

    messages: tuple[Json, ...]
    generation: Generation
    tools: ToolUse | None = None
    enable_thinking: bool | None = None  # None: as the template does by default
    thinking_token_budget: int | None = None  # the longest thought, None for any
    ignored: tuple[str, ...] = ()  # fields that change nothing here

    @property
    def num_answers(self) -> int:
        """Answers that are generated."""
        return self.generation.n

    @property
    def estimated_tokens(self) -> int:
        """Prompt tokens of all answers, estimated by characters: nothing is tokenised yet."""
        characters = sum(
            len(str(value)) for message in self.messages for name, value in message.items() if name != "role"
        )
        characters += 0 if self.tools is None else len(str(self.tools.tools))
        return characters // CHARACTERS_PER_TOKEN * self.generation.n


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions; each prompt is text or token ids."""

    prompts: Prompts
    echo: bool
    generation: Generation

    @property
    def num_answers(self) -> int:
        """Answers that are generated."""
        return self.generation.n * len(self.prompts)

    @property
    def scores_prompt(self) -> bool:
        """Whether the echoed prompt comes with its log-probabilities."""
        return self.echo and self.generation.sampling.logprobs is not None

    @property
    def estimated_tokens(self) -> int:
        """As of ChatCall."""
        texts = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        ids = sum(len(prompt) for prompt in self.prompts if not isinstance(prompt, str))
        return (texts // CHARACTERS_PER_TOKEN + ids) * self.generation.n


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


@dataclass(frozen=True, slots=True)
class PromptList:
    """A text, a list of token ids, or a list of either; a tuple of prompts."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        ids = {"type": "array", "items": dict(TOKEN), "minItems": 1}
        many = {"anyOf": [{"type": "string"}, ids]}
        lists = {"type": "array", "items": many, "minItems": 1, "maxItems": MAX_CHOICES}
        return {"anyOf": [{"type": "string"}, ids, lists]}

    def _check(self, value: object, info: Vocabulary) -> Prompts:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            raise wrong(_PROMPT)
        if is_token_ids(value, info.context):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise wrong(f"must have at most {MAX_CHOICES} prompts")
        prompts: list[str | tuple[int, ...]] = []
        for item in value:
            if isinstance(item, list) and item and is_token_ids(item, info.context):
                prompts.append(tuple(item))
            elif isinstance(item, str):
                prompts.append(item)
            else:
                raise wrong(_PROMPT)
        return tuple(prompts)


@dataclass(frozen=True, slots=True)
class _Part:
    """Any failure of a content part is one error."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return explained(handler(source), 'must be {"type": "text", "text": "..."}')


class TextPart(BaseModel):
    """A part of a message's content. Has no other field, not even a null."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Annotated[str, OneOf(("text",))]
    text: Annotated[str, Text()]


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<parts>" if isinstance(value, list) else None


#: Calls are the assistant's, and any message without calls has content.
_CALLS_OR_CONTENT: Json = {
    "if": {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    "then": {"properties": {"role": {"const": "assistant"}}},
    "else": {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
}


class ChatMessage(RequestModel):
    """A message of a conversation."""

    model_config = ConfigDict(json_schema_extra=_CALLS_OR_CONTENT)

    role: Annotated[str, OneOf(tuple(ROLES)), Field(description="Who speaks.")]
    content: Annotated[
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[Annotated[TextPart, _Part()]], Tag("<parts>")],
            Discriminator(
                _content_kind,
                custom_error_type="explained",
                custom_error_message="must be a string or a list of text parts",
            ),
        ]
        | None,
        Field(description="Text. Only an assistant's message with tool calls needs none."),
    ] = None
    name: Annotated[str, Text(MAX_NAME), Field(description="The name of the speaker.")] = ""
    reasoning_content: Annotated[
        str, Text(), Field(description="What the assistant thought before it answered.")
    ] = ""
    tool_calls: Annotated[
        list[ToolCall], ListOf(0, MAX_CALLS, "calls"), Field(description="What the assistant called.")
    ] = []
    tool_call_id: Annotated[
        str, Text(MAX_NAME), Field(description="Which call a tool's message is the result of.")
    ] = ""
    # Empty where a client sends back an answer of this server.
    annotations: Annotated[object, Neutral(([],))] = None
    refusal: Annotated[object, Neutral(("",))] = None
    audio: Annotated[object, Neutral(())] = None
    function_call: Annotated[object, Neutral(())] = None
    parsed: Annotated[object, Field(description="openai-python's own; not looked at.")] = None

    def to_template(self, path: str) -> Json:
        """The message as chat templates take it. Raises ApiError."""
        is_answer = self.role == "assistant"
        if self.content is None and not (is_answer and self.tool_calls):
            raise bad_field(f"{path}.content", "is required, and must be a string or a list of text parts")
        if self.tool_calls and not is_answer:
            raise bad_field(f"{path}.tool_calls", "belongs to messages of the assistant")
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message: Json = {"role": ROLES[self.role], "content": text}
        calls = [one.to_template() for one in self.tool_calls]
        more: Json = {
            "name": self.name,
            "reasoning_content": self.reasoning_content if is_answer else "",
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
        }
        return message | {name: value for name, value in more.items() if value}


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


Messages = Annotated[list[ChatMessage], ListOf(1, MAX_MESSAGES, "messages")]
_NAME = Field(description="A name from /v1/models.")
_MOST_TOKENS = f"At most {MAX_TEXT_TOKENS} tokens, or the model's context where that is longer."
_BAD_WORD = r"\S"


class GenerationRequest(SamplingFields):
    """What both kinds of completion request share."""

    model: Annotated[str, Text(MAX_NAME, required=True), _NAME]
    n: Annotated[int, Integer(1, MAX_N), Field(description="How many answers.")] = 1
    stream: Annotated[
        bool, Boolean(), Field(description="Whether to send the answer as server-sent events.")
    ] = False
    stream_options: Annotated[StreamOptions | None, Field(description="Only with `stream`.")] = None
    stop: Annotated[
        tuple[str, ...],
        Strings(_MAX_STRINGS, _MAX_STRING_LENGTH),
        Field(description="Strings that end the answer."),
    ] = ()
    bad_words: Annotated[
        tuple[str, ...],
        Strings(_MAX_STRINGS, _MAX_STRING_LENGTH, _BAD_WORD),
        Field(description="Strings that the answer shall not contain."),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Boolean(), Field(description="Whether the stop string is a part of the answer.")
    ] = False
    skip_special_tokens: Annotated[
        bool, Boolean(), Field(description="Whether special tokens are left out of the text.")
    ] = True
    user: Annotated[str, Text(MAX_NAME), Field(description="For the client's own records.")] = ""
    cache_salt: Annotated[
        str,
        Text(MAX_NAME),
        Field(description="Cached prefixes are shared only with requests of equal salt."),
    ] = ""
    cache_control: Annotated[
        CacheControl | None, Field(description="Keeps the prompt in the prefix cache.")
    ] = None
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
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="The same in vLLM's words; one of them.")
    ] = None
    service_tier: Annotated[object, Neutral(("auto", "default"))] = None
    store: Annotated[object, Neutral((False,))] = None
    metadata: Annotated[
        dict[str, str],
        Labels(16, 512),
        Field(description="For the client's own records; not kept."),
    ] = {}
    spaces_between_special_tokens: Annotated[object, Neutral((True,))] = None

    def generation(
        self, defaults: SamplingDefaults, vocab_size: int, max_tokens: int | None, logprobs: int | None
    ) -> Generation:
        """The common part of a call. Raises ApiError."""
        sampling = self.sampling_params(defaults, vocab_size, logprobs)
        if max_tokens is not None and sampling.min_tokens > max_tokens:
            raise bad_field("min_tokens", "is more than max_tokens")
        if sampling.prompt_logprobs is not None and (self.stream or self.n > 1):
            raise bad_field("prompt_logprobs", "is not supported together with stream or n")
        if self.resume is not None and (not self.stream or self.n > 1):
            raise bad_field("resume", "needs stream to be true, and n to be 1")
        if self.resume is not None and sampling.logprobs is not None:
            raise bad_field("resume", "is not supported together with logprobs")
        options = self.stream_options or StreamOptions()
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "needs stream to be true")
        return Generation(
            model=self.model,
            sampling=sampling,
            text=TextRules(
                stop=self.stop,
                include_stop=self.include_stop_str_in_output,
                skip_special_tokens=self.skip_special_tokens,
                min_tokens=sampling.min_tokens,
            ),
            max_tokens=max_tokens,
            bad_words=self.bad_words,
            watermark=self.watermark,
            n=self.n,
            stream=self.stream,
            include_usage=options.include_usage or options.continuous_usage_stats,
            continuous_usage=options.continuous_usage_stats,
            cache_salt=self.cache_salt,
            priority=self.priority,
            timeout=self.timeout,
            retry_on_timeout=self.retry_on_timeout and self.resume is None,
            cache_ttl=0.0 if self.cache_control is None else CACHE_TTLS[self.cache_control.ttl],
            form=wanted_form(self.response_format, self.structured_outputs, ignore_eos=sampling.ignore_eos),
            resume=self.resume,
        )


class ChatTemplateKwargs(RequestModel):
    """The variables of chat templates that a client may set."""

    enable_thinking: Annotated[
        bool | None, Boolean(), Field(description="Whether the model thinks before it answers.")
    ] = None


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[Messages, Field(description="The conversation so far. Text only.")]
    max_completion_tokens: Annotated[
        int | None, Integer(1, INT64_MAX), Field(description="The longest answer, in tokens.")
    ] = None
    max_tokens: Annotated[
        int | None, Integer(1, INT64_MAX), Field(description="The same by its older name.")
    ] = None
    logprobs: Annotated[
        bool, Boolean(), Field(description="Whether to return the log-probability of each token.")
    ] = False
    top_logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        Field(description="How many of the likeliest tokens to list at each position; needs `logprobs`."),
    ] = None
    tools: Annotated[
        list[Tool], ListOf(0, MAX_TOOLS, "tools"), Field(description="Functions that may be called.")
    ] = []
    tool_choice: Annotated[
        str | tuple[str] | None, ToolChoice(), Field(description="Whether one is called, and which.")
    ] = None
    parallel_tool_calls: Annotated[
        bool, Boolean(), Field(description="Whether an answer that has to call may call more than once.")
    ] = True
    chat_template_kwargs: Annotated[
        ChatTemplateKwargs | None, Field(description="Switches of the model's chat template.")
    ] = None
    reasoning_effort: Annotated[
        str, OneOf(EFFORTS), Field(description="none: without thinking, where the model has a switch for it.")
    ] = ""
    thinking_token_budget: Annotated[
        int | None,
        Integer(0, INT64_MAX),
        Field(description="The longest thought, in tokens; then it is ended, and the answer begins."),
    ] = None
    functions: Annotated[object, Neutral(([],))] = None
    function_call: Annotated[object, Neutral(("none", "auto"))] = None
    modalities: Annotated[object, Neutral((["text"],))] = None
    add_generation_prompt: Annotated[object, Neutral((True,))] = None
    continue_final_message: Annotated[object, Neutral((False,))] = None

    def to_call(self, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
        """The second check, with what the server knows. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        if self.max_completion_tokens not in (None, max_tokens):
            raise bad_field("max_tokens", "contradicts max_completion_tokens; send one of them")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        tools = tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        generation = self.generation(defaults, vocab_size, max_tokens, logprobs)
        if tools is not None and (tools.is_enforced or tools.is_strict):
            if generation.form is not None and generation.form.kind is not GrammarKind.JSON:
                raise bad_field(
                    generation.form.param, "contradicts tools that have to be called, or are strict"
                )
            if generation.sampling.ignore_eos:
                raise bad_field("ignore_eos", "is not supported together with tools: it would have no end")
        thinks = None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking
        return ChatCall(
            tuple(one.to_template(f"messages[{index}]") for index, one in enumerate(self.messages)),
            generation,
            tools,
            enable_thinking=False if thinks is None and self.reasoning_effort == "none" else thinks,
            thinking_token_budget=self.thinking_token_budget,
            ignored=(("metadata",) if self.metadata else ())
            + (("reasoning_effort",) if self.reasoning_effort not in ("", "none") else ()),
        )


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[
        Prompts,
        PromptList(),
        Field(
            description="A text, a list of token ids, or a list of either. "
            f"Prompts times `n` are at most {MAX_CHOICES}."
        ),
    ]
    echo: Annotated[bool, Boolean(), Field(description="Whether the answer begins with the prompt.")] = False
    logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        Field(description="How many of the likeliest tokens to list at each position."),
    ] = None
    max_tokens: Annotated[
        int,
        Integer(0, INT64_MAX),
        Field(description="The longest answer, in tokens; 0 only with `echo`."),
    ] = COMPLETION_MAX_TOKENS
    best_of: Annotated[object, Neutral((1,))] = None
    suffix: Annotated[object, Neutral(("",))] = None

    def to_call(self, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
        """The second check, with what the server knows. Raises ApiError."""
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "must be at least 1, except with echo")
        generation = self.generation(defaults, vocab_size, self.max_tokens, self.logprobs)
        if len(self.prompt) * self.n > MAX_CHOICES:
            message = f"{len(self.prompt)} prompts times {self.n} answers are more than {MAX_CHOICES}"
            raise bad_field("n", message)
        if self.echo and self.logprobs is not None:
            generation = _with_prompt_logprobs(generation, self.logprobs)
        return CompletionCall(self.prompt, self.echo, generation)


def _with_prompt_logprobs(generation: Generation, logprobs: int) -> Generation:
    """The log-probabilities of the echoed prompt are returned together with the answer's."""
    if generation.stream or generation.n > 1:
        raise bad_field("logprobs", "is not supported together with echo and stream or n")
    if generation.sampling.prompt_logprobs not in (None, logprobs):
        raise bad_field("prompt_logprobs", "must be what logprobs is, where echo is true")
    # lm-eval takes the last token for the answer and the others for the prompt, so none may be missing.
    text = replace(generation.text, logprob_of_stop=True)
    return replace(generation, sampling=replace(generation.sampling, prompt_logprobs=logprobs), text=text)


class TokenizeRequest(RequestModel):
    """The body of /tokenize: a prompt, or the messages of a chat."""

    model: Annotated[str | None, Text(MAX_NAME), _NAME] = None
    prompt: Annotated[str | None, Text(), Field(description=f"A text. {_MOST_TOKENS}")] = None
    add_special_tokens: Annotated[
        bool, Boolean(), Field(description="Whether to add what the tokenizer puts around a text.")
    ] = True
    messages: Annotated[Messages | None, Field(description="Or a conversation.")] = None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        """Two alternatives, as `check` has it."""
        fields = super().__get_pydantic_json_schema__(schema, handler)["properties"]
        prompt = fields["prompt"] | {"type": "string"}
        messages = fields["messages"]["anyOf"][0] | {"description": fields["messages"]["description"]}
        text = {"prompt": prompt} | {name: fields[name] for name in ("model", "add_special_tokens")}
        return {
            "anyOf": [
                closed(text, ["prompt"]),
                closed({"model": fields["model"], "messages": messages}, ["messages"]),
            ]
        }

    def check(self) -> None:
        """Exactly one of the two. Raises ApiError."""
        if self.prompt is None and self.messages is None:
            raise bad_field("prompt", "is required, or messages in its place")
        if self.prompt is not None and self.messages is not None:
            raise bad_field("messages", "give prompt or messages, not both")
        if self.messages is not None and "add_special_tokens" in self.model_fields_set:
            raise bad_field("add_special_tokens", "is supported with prompt only: leave it out")


class DetokenizeRequest(RequestModel):
    """The body of /detokenize."""

    model: Annotated[str | None, Text(MAX_NAME), _NAME] = None
    tokens: Annotated[
        tuple[int, ...],
        TokenIds(MAX_BODY_BYTES),
        Field(description=f"Token ids of the model. {_MOST_TOKENS}"),
    ]


def parse_chat(body: Json, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """A chat request from its JSON object. Raises ApiError."""
    return validate(ChatCompletionRequest, body, vocab_size).to_call(defaults, vocab_size)


def parse_completion(body: Json, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """A completion request from its JSON object. Raises ApiError."""
    return validate(CompletionRequest, body, vocab_size).to_call(defaults, vocab_size)
