"""Tools in a request: what may be called, what has to be, and calls and results in messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema, from_json

from quire_http.errors import bad_field
from quire_server.api.protocol.validation import Boolean, Json, OneOf, RequestModel, Text, as_text, wrong

MAX_TOOLS = 256
MAX_CALLS = 256
MAX_DESCRIPTION = 1 << 16
FUNCTION_NAME = Text(
    pattern="^[a-zA-Z0-9_.-]{1,64}$", text="must be 1 to 64 letters, digits, underscores, dots or hyphens"
)
_CHOICES = ("none", "auto", "required")
_NO_ARGUMENTS: Json = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object, as it is."""

    text: str = "must be a JSON schema: an object"

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"type": "object"}

    def _check(self, value: object) -> object:
        if not isinstance(value, dict):
            raise wrong(self.text)
        as_text(value)
        return value


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """The arguments of a call in a message: a JSON object as text, empty for none. A text that is no object,
    as of an answer that was cut, is shown to the model as it is.
    """

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"type": "string"}

    def _check(self, value: object) -> Json | str:
        if not isinstance(value, str):
            raise wrong("must be a JSON object as text")
        return self.read(value)

    def read(self, value: str) -> Json | str:
        """The object, or the text where it is none."""
        found = arguments_of(value)
        return value if found is None else found


def arguments_of(text: str) -> Json | None:
    """The object that this text is, empty of no text; None where it is none, or has what cannot be sent or
    shown to a model: a lone surrogate, a number that is none or infinite, or more than 200 levels.
    """
    try:
        found = from_json(text or "{}", allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # 1e400 reads as infinity
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Function(RequestModel):
    """A function that may be called."""

    name: Annotated[str, FUNCTION_NAME]
    description: Annotated[str, Text(MAX_DESCRIPTION), Field(description="For the model.")] = ""
    parameters: Annotated[
        dict[str, Any] | None, JsonObject(), Field(description="The JSON schema of its arguments.")
    ] = None
    strict: Annotated[bool, Boolean(), Field(description="Whether arguments always satisfy the schema.")] = (
        False
    )


class Tool(RequestModel):
    """OpenAI's tool: a function."""

    type: Annotated[str, OneOf(("function",))]
    function: Function

    def to_template(self) -> Json:
        """As chat templates take it."""
        function: Json = {"name": self.function.name, "description": self.function.description}
        return {"type": "function", "function": function | {"parameters": self.schema_of_arguments}}

    @property
    def schema_of_arguments(self) -> Json:
        """Of an object, whether the client says so or not."""
        given = self.function.parameters
        return {**_NO_ARGUMENTS, **given} if given else dict(_NO_ARGUMENTS)


class CalledFunction(RequestModel):
    """A function and its arguments."""

    name: Annotated[str, FUNCTION_NAME]
    arguments: Annotated[dict[str, Any] | str, ArgumentsText()]
    parsed_arguments: Annotated[object, Field(description="openai-python's own; not looked at.")] = None


class ToolCall(RequestModel):
    """A call in a message of the assistant."""

    id: Annotated[str, Text(256)] = ""
    type: Annotated[str, OneOf(("function",))] = "function"
    function: CalledFunction
    index: Annotated[object, Field(description="Not looked at.")] = None

    def to_template(self) -> Json:
        """As chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A word, or a function by name; its name then, in a tuple."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        named = {"type": "object", "properties": {"type": {"const": "function"}, "function": name}}
        return {"anyOf": [{"enum": list(_CHOICES)}, {**named, "required": ["type", "function"]}]}

    def _check(self, value: object) -> str | tuple[str]:
        if isinstance(value, str) and value in _CHOICES:
            return value
        if isinstance(value, dict) and value.get("type") == "function":
            function = value.get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                return (function["name"],)
        raise wrong('must be none, auto or required, or {"type": "function", "function": {"name": "..."}}')


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that may be called. ``is_enforced``: one has to be; ``is_strict``: arguments
    have to satisfy the schemas where the model calls of its own.
    """

    tools: tuple[Json, ...]
    schemas: Mapping[str, Json]
    is_enforced: bool
    is_strict: bool
    is_parallel: bool


def tool_use(
    tools: Sequence[Tool], choice: str | tuple[str] | None, is_parallel: bool | None
) -> ToolUse | None:
    """None where no tool may be called. Raises ApiError."""
    names = [tool.function.name for tool in tools]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise bad_field("tools", f"has two functions of the name {twice!r}; give each a name of its own")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "needs tools")
        return None
    if choice == "none":
        return None
    allowed = set(names)
    if isinstance(choice, tuple):
        if choice[0] not in allowed:
            raise bad_field("tool_choice", f"names {choice[0][:64]!r}, which is not one of the tools")
        allowed = {choice[0]}
    # The model sees all tools, also where it has to call a certain one.
    return ToolUse(
        tools=tuple(tool.to_template() for tool in tools),
        schemas={
            tool.function.name: tool.schema_of_arguments for tool in tools if tool.function.name in allowed
        },
        is_enforced=choice == "required" or isinstance(choice, tuple),
        is_strict=any(tool.function.strict for tool in tools),
        is_parallel=is_parallel is not False and not isinstance(choice, tuple),
    )
