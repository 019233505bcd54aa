"""The body of /v1/responses, as OpenAI has it, and the chat that it is.

Items become the messages that chat templates take: a message is one, calls and thoughts belong to the
assistant's, and an output of a call is a message of its own. Pure, as `requests`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from quire_http.errors import bad_field
from quire_server.api.protocol.generation import MAX_NAME, EngineRequest
from quire_server.api.protocol.requests import MAX_MESSAGES, ROLES, ChatCall, check_tools
from quire_server.api.protocol.structured_outputs import ANY_OBJECT, JsonSchema, closed
from quire_server.api.protocol.tools import (
    FUNCTION_NAME,
    MAX_DESCRIPTION,
    MAX_TOOLS,
    ArgumentsText,
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
    Labels,
    ListOf,
    Neutral,
    OneOf,
    RequestModel,
    Text,
    kind_of,
    validate,
    wrong,
)
from quire_server.core.sampling_params import INT64_MAX, GrammarKind
from quire_server.model_dir.generation_config import SamplingDefaults
from quire_server.text.grammar_compiler import GrammarRequest

_MAX_PARTS = 4096
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_STATUSES = ("in_progress", "completed", "incomplete")
_INCLUDED = ("reasoning.encrypted_content",)
_TEXT_ALONE = "images, files and the tools that OpenAI runs itself are not supported"
_CHOICES = ("none", "auto", "required")
_PARTS = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated["list[TextPart]", ListOf(0, _MAX_PARTS, "parts"), Tag("<list>")],
    kind_of(str, list, text="must be a string or a list of parts"),
]

#: The messages of a stored response and its input; None where there is none of this id.
FindConversation = Callable[[str], Sequence[Json] | None]

Status = Annotated[str, OneOf(_STATUSES), Field(description="Not looked at.")]
Identity = Annotated[str, Text(MAX_NAME), Field(description="Not looked at.")]


class TextPart(RequestModel):
    """A part of a message's content."""

    type: Annotated[
        str,
        OneOf(
            ("input_text", "output_text"),
            f"must be input_text or output_text: {_TEXT_ALONE}",
        ),
    ]
    text: Annotated[str, Text()]
    annotations: Annotated[object, Neutral(([],))] = None
    logprobs: Annotated[object, Neutral(([],))] = None


class InputMessage(RequestModel):
    """What was said."""

    type: Annotated[Literal["message"], OneOf(("message",))] = "message"
    role: Annotated[str, OneOf(("user", "assistant", "system", "developer"))]
    content: _PARTS
    id: Identity = ""
    status: Status = ""
    phase: Annotated[object, Neutral(("commentary", "final_answer"))] = None


class FunctionCall(RequestModel):
    """A call of the assistant's."""

    type: Annotated[Literal["function_call"], OneOf(("function_call",))]
    call_id: Annotated[str, Text(MAX_NAME)]
    name: Annotated[str, FUNCTION_NAME]
    arguments: Annotated[dict[str, Any] | str, ArgumentsText()]
    id: Identity = ""
    status: Status = ""

    def to_template(self) -> Json:
        """As chat templates take it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(RequestModel):
    """What a call gave back."""

    type: Annotated[Literal["function_call_output"], OneOf(("function_call_output",))]
    call_id: Annotated[str, Text(MAX_NAME)]
    output: _PARTS
    id: Identity = ""
    status: Status = ""


class SummaryPart(RequestModel):
    """A part of the summary of a thought."""

    type: Annotated[str, OneOf(("summary_text",))]
    text: Annotated[str, Text()]


class ThoughtPart(RequestModel):
    """A part of a thought."""

    type: Annotated[str, OneOf(("reasoning_text",))]
    text: Annotated[str, Text()]


class Reasoning(RequestModel):
    """A thought of the assistant's."""

    type: Annotated[Literal["reasoning"], OneOf(("reasoning",))]
    id: Identity = ""
    summary: Annotated[
        list[SummaryPart], ListOf(0, _MAX_PARTS, "parts"), Field(description="Not looked at.")
    ] = []
    content: Annotated[list[ThoughtPart], ListOf(0, _MAX_PARTS, "parts")] = []
    encrypted_content: Annotated[object, Neutral(("",))] = None
    status: Status = ""


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    kind_of(
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        default="message",
        text="must be an item of the type message, function_call, function_call_output or reasoning: "
        f"{_TEXT_ALONE}, and items of others are not referred to",
    ),
]


class FunctionTool(RequestModel):
    """A function that may be called."""

    type: Annotated[
        str, OneOf(("function",), f'must be "function": {_TEXT_ALONE}; give functions and run them')
    ]
    name: Annotated[str, FUNCTION_NAME]
    description: Annotated[str, Text(MAX_DESCRIPTION), Field(description="For the model.")] = ""
    parameters: Annotated[
        dict[str, Any] | None, JsonObject(), Field(description="The JSON schema of its arguments.")
    ] = None
    strict: Annotated[bool, Boolean(), Field(description="Whether arguments always satisfy the schema.")] = (
        False
    )
    defer_loading: Annotated[object, Neutral((False,))] = None

    def to_tool(self) -> Tool:
        """The same in the form of chat completions."""
        fields = {name: getattr(self, name) for name in Function.model_fields}
        return Tool.model_construct(type="function", function=Function.model_construct(**fields))


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """A word, or a function by name; its name then, in a tuple."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        named = {"type": {"const": "function"}, "name": {"type": "string"}}
        return {"anyOf": [{"enum": list(_CHOICES)}, closed(named, ["type", "name"])]}

    def _check(self, value: object) -> str | tuple[str]:
        if isinstance(value, str) and value in _CHOICES:
            return value
        if isinstance(value, dict):
            given = {name: one for name, one in value.items() if one is not None}
            name = given.pop("name", None)
            if given == {"type": "function"} and isinstance(name, str):
                return (name,)
        raise wrong('must be none, auto or required, or {"type": "function", "name": "..."}')


class TextFormat(RequestModel):
    """A text, or any JSON object."""

    type: Annotated[Literal["text", "json_object"], OneOf(("text", "json_object"))]

    def wanted(self) -> GrammarRequest | None:
        """What constrains the answer."""
        is_text = self.type == "text"
        return None if is_text else GrammarRequest(GrammarKind.JSON, ANY_OBJECT, "text.format")


class SchemaFormat(RequestModel):
    """JSON of a schema."""

    type: Annotated[Literal["json_schema"], OneOf(("json_schema",))]
    name: Annotated[str, FUNCTION_NAME]
    schema_: Annotated[str, JsonSchema(), Field(alias="schema")]
    description: Annotated[str, Text(MAX_DESCRIPTION), Field(description="For readers.")] = ""
    strict: Annotated[
        bool, Boolean(), Field(description="Changes nothing: an answer always follows the schema.")
    ] = False

    def wanted(self) -> GrammarRequest | None:
        """What constrains the answer."""
        return GrammarRequest(GrammarKind.JSON, self.schema_, "text.format.schema")


class TextConfig(RequestModel):
    """The answer's text."""

    format: Annotated[
        Annotated[
            Annotated[TextFormat, Tag("<text>")] | Annotated[SchemaFormat, Tag("<schema>")],
            kind_of(
                "text",
                "json_object",
                "json_schema",
                names={"json_object": "text", "json_schema": "schema"},
                text="must have the type text, json_object or json_schema",
            ),
        ]
        | None,
        Field(description="Its form."),
    ] = None
    verbosity: Annotated[str, OneOf(("low", "medium", "high")), Field(description="Changes nothing.")] = ""


class ReasoningConfig(RequestModel):
    """Whether and how the model thinks."""

    effort: Annotated[
        str, OneOf(_EFFORTS), Field(description="none: without thinking; else with, where the model can.")
    ] = ""
    summary: Annotated[str, OneOf(_SUMMARIES), Field(description="Changes nothing.")] = ""
    generate_summary: Annotated[str, OneOf(_SUMMARIES), Field(description="Changes nothing.")] = ""


@dataclass(frozen=True, slots=True)
class InForeground:
    """false: what runs in the background is a job of the gateway's."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"const": False}

    def _check(self, value: object) -> bool:
        if value is not False:
            raise wrong(
                "must be false: for answers in the background send the request to the gateway's /v1/jobs"
            )
        return value


class ResponsesRequest(EngineRequest):
    """The body of /v1/responses."""

    input: Annotated[
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[Item], ListOf(1, MAX_MESSAGES, "items"), Tag("<list>")],
            kind_of(str, list, text=f"must be a string or a list of 1 to {MAX_MESSAGES} items"),
        ],
        Field(description="What is said to the model, after the conversation so far. Text only."),
    ]
    instructions: Annotated[
        str, Text(), Field(description="Before the conversation; those of an earlier response do not count.")
    ] = ""
    previous_response_id: Annotated[
        str, Text(MAX_NAME), Field(description="A stored response, whose conversation goes on.")
    ] = ""
    store: Annotated[
        bool, Boolean(), Field(description="Whether the response is kept, for a while and in memory.")
    ] = True
    max_output_tokens: Annotated[
        int | None, Integer(1, INT64_MAX), Field(description="The longest answer, in tokens.")
    ] = None
    tools: Annotated[
        list[FunctionTool], ListOf(0, MAX_TOOLS, "tools"), Field(description="Functions that may be called.")
    ] = []
    tool_choice: Annotated[
        str | tuple[str], FunctionChoice(), Field(description="Whether one is called, and which.")
    ] = "auto"
    parallel_tool_calls: Annotated[
        bool, Boolean(), Field(description="Whether an answer that has to call may call more than once.")
    ] = True
    text: Annotated[TextConfig | None, Field(description="The form of the answer's text.")] = None
    reasoning: Annotated[ReasoningConfig | None, Field(description="Whether the model thinks first.")] = None
    thinking_token_budget: Annotated[
        int | None,
        Integer(0, INT64_MAX),
        Field(description="The longest thought, in tokens; then it is ended, and the answer begins."),
    ] = None
    metadata: Annotated[
        dict[str, str], Labels(16, 512, 64), Field(description="For the client's own records.")
    ] = {}
    include: Annotated[
        list[Annotated[str, OneOf(_INCLUDED)]],
        ListOf(0, len(_INCLUDED), "names"),
        Field(description="Changes nothing: no thought is encrypted."),
    ] = []
    user: Annotated[str, Text(MAX_NAME), Field(description="For the client's own records.")] = ""
    safety_identifier: Annotated[str, Text(MAX_NAME), Field(description="The same.")] = ""
    prompt_cache_key: Annotated[
        str, Text(MAX_NAME), Field(description="Keeps requests at one replica, at a gateway.")
    ] = ""
    background: Annotated[bool, InForeground(), Field(description="Only false.")] = False
    truncation: Annotated[object, Neutral(("disabled",))] = None
    service_tier: Annotated[object, Neutral(("auto", "default"))] = None
    top_logprobs: Annotated[object, Neutral((0,))] = None
    prompt_logprobs: Annotated[object, Neutral(())] = None

    def to_call(
        self, defaults: SamplingDefaults, vocab_size: int, find: FindConversation
    ) -> tuple[ChatCall, Sequence[Json]]:
        """The chat, and its conversation without the instructions. Raises ApiError."""
        tools = self._tool_use()
        form = None if self.text is None or self.text.format is None else self.text.format.wanted()
        generation = self.engine_generation(defaults, vocab_size, self.max_output_tokens, form=form)
        check_tools(tools, generation)
        earlier: Sequence[Json] = ()
        if self.previous_response_id:
            found = find(self.previous_response_id)
            if found is None:
                raise bad_field(
                    "previous_response_id",
                    "this response is not kept here (any more); send the whole conversation as input",
                    code="previous_response_not_found",
                )
            earlier = found
        conversation = [*earlier, *messages_of(self.input)]
        before = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = "" if self.reasoning is None else self.reasoning.effort
        call = ChatCall(
            (*before, *conversation),
            generation,
            tools,
            enable_thinking=effort != "none" if effort else None,
            thinking_token_budget=self.thinking_token_budget,
            ignored=tuple(self._ignored()),
        )
        return call, conversation

    def _tool_use(self) -> ToolUse | None:
        tools = [tool.to_tool() for tool in self.tools]
        return tool_use(tools, self.tool_choice, self.parallel_tool_calls)

    def _ignored(self) -> Iterable[str]:
        reasoning = self.reasoning or ReasoningConfig.model_construct()
        if reasoning.summary or reasoning.generate_summary:
            yield "reasoning.summary"
        if self.text is not None and self.text.verbosity:
            yield "text.verbosity"
        if self.include:
            yield "include"

    def echo(self, defaults: SamplingDefaults) -> tuple[Json, Json]:
        """What a response repeats of its request: the fields before its model, and those after its output."""
        choice: Json | str = self.tool_choice if isinstance(self.tool_choice, str) else {}
        if isinstance(self.tool_choice, tuple):
            choice = {"type": "function", "name": self.tool_choice[0]}
        tools = [
            {"type": "function"}
            | {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
            for tool in self.tools
        ]
        sampling = self.sampling_params(defaults, 1 << 31, None)
        reasoning = self.reasoning
        return {
            "instructions": self.instructions or None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
        }, {
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id or None,
            "reasoning": {"effort": (reasoning.effort if reasoning else "") or None, "summary": None},
            "store": self.store,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice,
            "tools": tools,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": self.user or None,
        }

    def _format(self) -> Json:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, SchemaFormat):
            return {
                "type": wanted.type,
                "name": wanted.name,
                "schema": json.loads(wanted.schema_),
                "strict": wanted.strict,
            }
        return {"type": "text" if wanted is None else wanted.type}


def messages_of(given: str | Sequence[Item]) -> list[Json]:
    """The input as chat templates take it. What the assistant thought, said and called is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[Json] = []
    is_open = False  # the last message is the assistant's, and has no call yet where a text may follow
    for item in given:
        match item:
            case InputMessage(role=role, content=content) if role != "assistant":
                found.append({"role": ROLES[role], "content": _text(content)})
                is_open = False
            case FunctionCallOutput(call_id=call_id, output=output):
                found.append({"role": "tool", "content": _text(output), "tool_call_id": call_id})
                is_open = False
            case _:
                if not is_open or (isinstance(item, Reasoning) and found[-1]["content"]):
                    found.append({"role": "assistant", "content": ""})
                    is_open = True
                _add(found[-1], item)
    return found


def _add(message: Json, item: Item) -> None:
    """Add to the assistant's message."""
    match item:
        case InputMessage(content=content):
            message["content"] = "\n".join(filter(None, (message["content"], _text(content))))
        case FunctionCall():
            message["tool_calls"] = [*message.get("tool_calls", ()), item.to_template()]
        case Reasoning(content=content):
            message["reasoning_content"] = "\n".join(part.text for part in content)


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def parse_responses(body: Json, vocab_size: int) -> ResponsesRequest:
    """A request for a response from its JSON object. Raises ApiError."""
    return validate(ResponsesRequest, body, vocab_size)
