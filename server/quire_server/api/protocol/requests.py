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
from quire_server.api.protocol.generation import (
    MAX_NAME,
    NAME_OF_MODEL,
    Generation,
    GenerationRequest,
)
from quire_server.api.protocol.sampling import MAX_LOGPROBS
from quire_server.api.protocol.structured_outputs import (
    closed,
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
    ListOf,
    Neutral,
    OneOf,
    RequestModel,
    Text,
    TokenIds,
    Vocabulary,
    explained,
    is_token_ids,
    validate,
    wrong,
)
from quire_server.core.sampling_params import INT64_MAX, GrammarKind
from quire_server.model_dir.generation_config import SamplingDefaults

MAX_CHOICES = 64
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
_PROMPT = "must be a string, a list of strings, or a list of token ids of the model"

Prompts = tuple[str | tuple[int, ...], ...]


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
        return self.longest_prompt * self.generation.n

    @property
    def longest_prompt(self) -> int:
        """Estimated tokens of the longest prompt, here the only one."""
        characters = sum(
            len(str(value)) for message in self.messages for name, value in message.items() if name != "role"
        )
        characters += 0 if self.tools is None else len(str(self.tools.tools))
        return characters // CHARACTERS_PER_TOKEN


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions; each prompt is text or token ids."""

    prompts: Prompts
    echo: bool
    generation: Generation
    suffix: str = ""  # the answer stands between a prompt and this text

    @property
    def num_answers(self) -> int:
        """Answers that are generated."""
        return self.generation.n * len(self.prompts)

    @property
    def parts(self) -> Prompts:
        """All that the client wrote."""
        return (*self.prompts, self.suffix) if self.suffix else self.prompts

    @property
    def scores_prompt(self) -> bool:
        """Whether the echoed prompt comes with its log-probabilities."""
        return self.echo and self.generation.sampling.logprobs is not None

    @property
    def estimated_tokens(self) -> int:
        """As of ChatCall."""
        texts = sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))
        ids = sum(len(prompt) for prompt in self.prompts if not isinstance(prompt, str))
        texts += len(self.suffix) * len(self.prompts)
        return (texts // CHARACTERS_PER_TOKEN + ids) * self.generation.n

    @property
    def longest_prompt(self) -> int:
        """As of ChatCall."""
        return len(self.suffix) // CHARACTERS_PER_TOKEN + max(
            len(prompt) // CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt)
            for prompt in self.prompts
        )


@dataclass(frozen=True, slots=True)
class PromptList:
    """A text, a list of token ids, or a list of either; a tuple of prompts."""

    max_items: int = MAX_CHOICES

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        ids = {"type": "array", "items": dict(TOKEN), "minItems": 1}
        many = {"anyOf": [{"type": "string"}, ids]}
        lists = {"type": "array", "items": many, "minItems": 1, "maxItems": self.max_items}
        return {"anyOf": [{"type": "string"}, ids, lists]}

    def _check(self, value: object, info: Vocabulary) -> Prompts:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not value:
            raise wrong(_PROMPT)
        if is_token_ids(value, info.context):
            return (tuple(value),)
        if len(value) > self.max_items:
            raise wrong(f"must have at most {self.max_items} prompts")
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


Messages = Annotated[list[ChatMessage], ListOf(1, MAX_MESSAGES, "messages")]
_MOST_TOKENS = f"At most {MAX_TEXT_TOKENS} tokens, or the model's context where that is longer."


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
        check_tools(tools, generation)
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


def check_tools(tools: ToolUse | None, generation: Generation) -> None:
    """Tools whose calls are enforced leave no choice of the answer's form. Raises ApiError."""
    if tools is None or not (tools.is_enforced or tools.is_strict):
        return
    if generation.form is not None and generation.form.kind is not GrammarKind.JSON:
        raise bad_field(generation.form.param, "contradicts tools that have to be called, or are strict")
    if generation.sampling.ignore_eos:
        raise bad_field("ignore_eos", "is not supported together with tools: it would have no end")


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
    suffix: Annotated[
        str,
        Text(),
        Field(
            description="The text after the answer, which then goes between `prompt` and this; needs a model "
            "with tokens for it."
        ),
    ] = ""

    def to_call(self, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
        """The second check, with what the server knows. Raises ApiError."""
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "must be at least 1, except with echo")
        generation = self.generation(defaults, vocab_size, self.max_tokens, self.logprobs)
        if len(self.prompt) * self.n > MAX_CHOICES:
            message = f"{len(self.prompt)} prompts times {self.n} answers are more than {MAX_CHOICES}"
            raise bad_field("n", message)
        if self.suffix and not all(isinstance(one, str) for one in self.prompt):
            raise bad_field("suffix", "needs a prompt that is text: send token ids of the whole instead")
        if self.echo and self.logprobs is not None:
            if self.suffix:
                raise bad_field("suffix", "is not supported together with echo and logprobs")
            generation = _with_prompt_logprobs(generation, self.logprobs)
        return CompletionCall(self.prompt, self.echo, generation, self.suffix)


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

    model: Annotated[str | None, Text(MAX_NAME), NAME_OF_MODEL] = None
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

    model: Annotated[str | None, Text(MAX_NAME), NAME_OF_MODEL] = None
    tokens: Annotated[
        tuple[int, ...],
        TokenIds(MAX_BODY_BYTES),
        Field(description=f"Token ids of the model. {_MOST_TOKENS}"),
    ]


class LoadAdapterRequest(RequestModel):
    """The body of /v1/load_lora_adapter."""

    lora_name: Annotated[
        str, Text(MAX_NAME, required=True), Field(description="The name by which requests ask for it.")
    ]
    lora_path: Annotated[
        str, Text(4096, required=True), Field(description="Its directory, in the server's --adapters-dir.")
    ]


class UnloadAdapterRequest(RequestModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Text(MAX_NAME, required=True), Field(description="The adapter's name.")]


def parse_chat(body: Json, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """A chat request from its JSON object. Raises ApiError."""
    return validate(ChatCompletionRequest, body, vocab_size).to_call(defaults, vocab_size)


def parse_completion(body: Json, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """A completion request from its JSON object. Raises ApiError."""
    return validate(CompletionRequest, body, vocab_size).to_call(defaults, vocab_size)
