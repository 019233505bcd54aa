"""The bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic has them, as chats.

A conversation of blocks becomes the messages that chat templates take: text is content, a thought is
reasoning, a use of a tool is a call, and its result a message of its own. Pure, as `requests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from quire_http.errors import bad_field
from quire_server.api.protocol.generation import (
    CACHE_TTLS,
    MAX_NAME,
    MAX_STRING_LENGTH,
    MAX_STRINGS,
    NAME_OF_MODEL,
    CacheControl,
    EngineRequest,
)
from quire_server.api.protocol.requests import MAX_MESSAGES, ChatCall, check_tools
from quire_server.api.protocol.structured_outputs import JsonSchema
from quire_server.api.protocol.tools import (
    MAX_CALLS,
    MAX_DESCRIPTION,
    MAX_TOOLS,
    Function,
    JsonObject,
    Tool,
    ToolUse,
    tool_use,
)
from quire_server.api.protocol.validation import (
    Boolean,
    Integer,
    Json,
    ListOf,
    Neutral,
    OneOf,
    RequestModel,
    Strings,
    Text,
    kind_of,
    validate,
    wrong,
)
from quire_server.core.sampling_params import INT64_MAX, GrammarKind
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.grammar_compiler import GrammarRequest

_MAX_BLOCKS = 4096
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TOOL_NAME = Text(
    pattern="^[a-zA-Z0-9_.-]{1,128}$", text="must be 1 to 128 letters, digits, underscores, dots or hyphens"
)
_NOT_HERE = "images, documents and the tools that Anthropic runs itself are not supported"
_CUSTOM = OneOf(
    ("custom",), f'must be "custom", or be left out: {_NOT_HERE}; give tools an input_schema and run them'
)
_CHOICES = ("auto", "any", "tool", "none")

Cached = Annotated[CacheControl | None, Field(description="Keeps the prompt in the prefix cache.")]


class TextBlock(RequestModel):
    """A text."""

    type: Annotated[Literal["text"], OneOf(("text",))]
    text: Annotated[str, Text()]
    cache_control: Cached = None
    citations: Annotated[object, Neutral(([],))] = None


class ThinkingBlock(RequestModel):
    """A thought of the assistant's, as an answer had it."""

    type: Annotated[Literal["thinking"], OneOf(("thinking",))]
    thinking: Annotated[str, Text()]
    signature: Annotated[str, Text(), Field(description="Not looked at.")] = ""


class ToolUseBlock(RequestModel):
    """A call of the assistant's."""

    type: Annotated[Literal["tool_use"], OneOf(("tool_use",))]
    id: Annotated[str, Text(MAX_NAME)]
    name: Annotated[str, _TOOL_NAME]
    input: Annotated[dict[str, Any], JsonObject("must be an object of arguments")]
    cache_control: Cached = None

    def to_template(self) -> Json:
        """As chat templates take it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


TextBlocks = Annotated[
    Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[TextBlock], ListOf(0, _MAX_BLOCKS, "blocks"), Tag("<list>")],
        kind_of(str, list),
    ],
    Field(description="Text."),
]


class ToolResultBlock(RequestModel):
    """What a tool gave back."""

    type: Annotated[Literal["tool_result"], OneOf(("tool_result",))]
    tool_use_id: Annotated[str, Text(MAX_NAME)]
    content: TextBlocks | None = None
    is_error: Annotated[bool, Boolean(), Field(description="Whether the tool failed.")] = False
    cache_control: Cached = None

    def to_template(self) -> Json:
        """As chat templates take it."""
        text = _text("" if self.content is None else self.content)
        text = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "content": text, "tool_call_id": self.tool_use_id}


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    kind_of("text", "tool_result", text=f"must be a block of the type text or tool_result: {_NOT_HERE}"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    kind_of(
        "text",
        "thinking",
        "tool_use",
        text=f"must be a block of the type text, thinking or tool_use: {_NOT_HERE}",
    ),
]


class UserMessage(RequestModel):
    """What the user says, and what tools gave back."""

    role: Annotated[Literal["user"], OneOf(("user",))]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[UserBlock], ListOf(0, _MAX_BLOCKS, "blocks"), Tag("<list>")],
        kind_of(str, list),
    ]

    def to_template(self) -> list[Json]:
        """A message of a tool for each result, and the user's for texts between them."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        found: list[Json] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                found.append(block.to_template())
            elif found and found[-1]["role"] == "user":
                found[-1]["content"] += f"\n{block.text}"
            else:
                found.append({"role": "user", "content": block.text})
        return found or [{"role": "user", "content": ""}]


class AssistantMessage(RequestModel):
    """An answer."""

    role: Annotated[Literal["assistant"], OneOf(("assistant",))]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[AssistantBlock], ListOf(0, MAX_CALLS, "blocks"), Tag("<list>")],
        kind_of(str, list),
    ]

    def to_template(self) -> list[Json]:
        """One message."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [block.to_template() for block in self.content if isinstance(block, ToolUseBlock)]
        more: Json = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
        message: Json = {"role": "assistant", "content": "\n".join(texts)}
        return [message | {name: value for name, value in more.items() if value}]


class SystemMessage(RequestModel):
    """An instruction in the middle of a conversation."""

    role: Annotated[Literal["system"], OneOf(("system",))]
    content: TextBlocks

    def to_template(self) -> list[Json]:
        """One message."""
        return [{"role": "system", "content": _text(self.content)}]


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    kind_of("user", "assistant", "system", key="role", text="must have the role user, assistant or system"),
]


class MessagesTool(RequestModel):
    """A tool that the client runs."""

    type: Annotated[str, _CUSTOM] = "custom"
    name: Annotated[str, _TOOL_NAME]
    description: Annotated[str, Text(MAX_DESCRIPTION), Field(description="For the model.")] = ""
    input_schema: Annotated[
        dict[str, Any], JsonObject(), Field(description="The JSON schema of its arguments.")
    ]
    strict: Annotated[bool, Boolean(), Field(description="Whether arguments always satisfy the schema.")] = (
        False
    )
    cache_control: Cached = None
    allowed_callers: Annotated[object, Neutral((["direct"],))] = None
    defer_loading: Annotated[object, Neutral((False,))] = None
    eager_input_streaming: Annotated[
        bool, Boolean(), Field(description="Changes nothing: arguments are always sent as they come.")
    ] = True

    def to_tool(self) -> Tool:
        """The same in OpenAI's form."""
        function = Function.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of tools: OpenAI's word or name, and whether calls may be parallel."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        flag = {"disable_parallel_tool_use": {"type": ["boolean", "null"]}}
        common = {"type": "object", "additionalProperties": {"type": "null"}}
        word = {"type": {"enum": ["auto", "any"]}, **flag}
        named = {"type": {"const": "tool"}, "name": {"type": "string"}, **flag}
        return {
            "anyOf": [
                {**common, "properties": word, "required": ["type"]},
                {**common, "properties": {"type": {"const": "none"}}, "required": ["type"]},
                {**common, "properties": named, "required": ["type", "name"]},
            ]
        }

    def _check(self, value: object) -> tuple[str | tuple[str], bool]:
        given = (
            {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else {}
        )
        kind, name = given.pop("type", None), given.pop("name", None)
        alone = given.pop("disable_parallel_tool_use", False) if kind != "none" else False
        is_right = kind in _CHOICES and not given and type(alone) is bool
        if not is_right or isinstance(name, str) != (kind == "tool"):
            raise wrong(
                "must have the type auto, any, none, or tool with a name; all but none may have "
                "disable_parallel_tool_use"
            )
        words: dict[str, str | tuple[str]] = {"any": "required", "auto": "auto", "none": "none"}
        return words.get(str(kind), (str(name),)), not alone


class ThinkingEnabled(RequestModel):
    """A thought of a limited length."""

    type: Annotated[Literal["enabled"], OneOf(("enabled",))]
    budget_tokens: Annotated[int, Integer(0, INT64_MAX), Field(description="The longest thought, in tokens.")]
    display: Annotated[object, Neutral(("summarized",))] = None


class ThinkingSwitch(RequestModel):
    """A thought of any length, or none."""

    type: Annotated[Literal["adaptive", "disabled"], OneOf(("adaptive", "disabled"))]
    display: Annotated[object, Neutral(("summarized",))] = None


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("<enabled>")] | Annotated[ThinkingSwitch, Tag("<switch>")],
    kind_of(
        "enabled",
        "adaptive",
        "disabled",
        names={"adaptive": "switch", "disabled": "switch"},
        text="must have the type enabled, adaptive or disabled",
    ),
]


class OutputFormat(RequestModel):
    """The form of the answer's text."""

    type: Annotated[Literal["json_schema"], OneOf(("json_schema",))]
    schema_: Annotated[str, JsonSchema(), Field(alias="schema")]


class OutputConfig(RequestModel):
    """How the answer is given."""

    format: Annotated[OutputFormat | None, Field(description="The form of the answer.")] = None
    effort: Annotated[
        str, OneOf(_EFFORTS), Field(description="Changes nothing; `x-quire-ignored` names it.")
    ] = ""


class Metadata(RequestModel):
    """About the request."""

    user_id: Annotated[str, Text(MAX_NAME), Field(description="For the client's own records.")] = ""


class Conversation(RequestModel):
    """What both routes take."""

    messages: Annotated[
        list[Message],
        ListOf(1, MAX_MESSAGES, "messages"),
        Field(description="The conversation so far; the last message is not the assistant's. Text only."),
    ]
    system: Annotated[TextBlocks | None, Field(description="Instructions before it.")] = None
    tools: Annotated[
        list[MessagesTool], ListOf(0, MAX_TOOLS, "tools"), Field(description="Tools that may be used.")
    ] = []
    tool_choice: Annotated[
        tuple[str | tuple[str], bool] | None,
        Choice(),
        Field(description="Whether one is used, which, and whether more than one may be."),
    ] = None
    thinking: Annotated[
        Thinking | None,
        Field(description="Whether the model thinks first, where it can; left out: as its template has it."),
    ] = None
    output_config: Annotated[OutputConfig | None, Field(description="The form of the answer.")] = None
    cache_control: Cached = None

    def to_messages(self) -> tuple[Json, ...]:
        """As chat templates take them. Raises ApiError."""
        if self.messages[-1].role == "assistant":
            raise bad_field(
                f"messages[{len(self.messages) - 1}].role",
                "the last message must not be the assistant's: no answer is begun by the client",
            )
        found = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return (*found, *(one for message in self.messages for one in message.to_template()))

    def tool_use(self) -> ToolUse | None:
        """Which tools may be used. Raises ApiError."""
        choice, is_parallel = (None, True) if self.tool_choice is None else self.tool_choice
        return tool_use([tool.to_tool() for tool in self.tools], choice, is_parallel)

    @property
    def form(self) -> GrammarRequest | None:
        """What constrains the answer."""
        wanted = None if self.output_config is None else self.output_config.format
        if wanted is None:
            return None
        return GrammarRequest(GrammarKind.JSON, wanted.schema_, "output_config.format.schema")

    @property
    def enable_thinking(self) -> bool | None:
        """None: as the template does by default."""
        return None if self.thinking is None else self.thinking.type != "disabled"

    @property
    def thinking_token_budget(self) -> int | None:
        """The longest thought, None for any."""
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that change nothing."""
        has_effort = self.output_config is not None and self.output_config.effort
        return ("output_config.effort",) if has_effort else ()

    @property
    def cache_ttl(self) -> float:
        """Seconds for which the prompt is pinned: the longest that any part of it asks for."""
        return max((CACHE_TTLS[one.ttl] for one in self._cache_controls()), default=0.0)

    def _cache_controls(self) -> Iterable[CacheControl]:
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        for one in (self, *self.tools, *blocks):
            found = getattr(one, "cache_control", None)
            if found is not None:
                yield found


class MessagesRequest(EngineRequest, Conversation):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Integer(1, INT64_MAX), Field(description="The longest answer, in tokens.")]
    stop_sequences: Annotated[
        tuple[str, ...],
        Strings(MAX_STRINGS, MAX_STRING_LENGTH),
        Field(description="Strings that end the answer."),
    ] = ()
    metadata: Annotated[Metadata | None, Field(description="For the client's own records.")] = None
    service_tier: Annotated[object, Neutral(("auto", "standard_only"))] = None
    prompt_logprobs: Annotated[object, Neutral(())] = None

    def to_call(self, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
        """The second check, with what the server knows. Raises ApiError."""
        tools = self.tool_use()
        generation = self.engine_generation(
            defaults,
            vocab_size,
            self.max_tokens,
            stop=self.stop_sequences,
            form=self.form,
            cache_ttl=self.cache_ttl,
        )
        check_tools(tools, generation)
        return ChatCall(
            self.to_messages(),
            generation,
            tools,
            enable_thinking=self.enable_thinking,
            thinking_token_budget=self.thinking_token_budget,
            ignored=self.ignored,
        )


class CountTokensRequest(Conversation):
    """The body of /v1/messages/count_tokens."""

    model: Annotated[str, Text(MAX_NAME, required=True), NAME_OF_MODEL]

    def to_call(self) -> ChatCall:
        """The chat whose prompt is counted. Raises ApiError."""
        request = MessagesRequest.model_construct(
            model=self.model,
            max_tokens=1,
            **{name: getattr(self, name) for name in Conversation.model_fields},
        )
        return request.to_call(SamplingDefaults(), 0)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def parse_messages(body: Json, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """A request for a message from its JSON object. Raises ApiError."""
    return validate(MessagesRequest, body, vocab_size).to_call(defaults, vocab_size)
