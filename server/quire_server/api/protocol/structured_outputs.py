"""The fields that constrain the form of an answer: OpenAI's ``response_format`` and vLLM's
``structured_outputs``.

Pure: whether a schema or an expression is valid is found by ``text.grammar_compiler``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from quire_http.errors import bad_field
from quire_server.api.protocol.validation import (
    Boolean,
    Json,
    OneOf,
    RequestModel,
    Text,
    as_text,
    explained,
    wrong,
)
from quire_server.core.sampling_params import GrammarKind
from quire_server.text.grammar_compiler import GrammarRequest

ANY_OBJECT = '{"type": "object"}'
_MAX_CHOICES = 1000
_MAX_DESCRIPTION = 1 << 16
_OBJECT: Json = {"type": "object", "description": "A JSON schema."}
_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON schema; as a string, too, where ``or_text``. Any object: what is in it is the compiler's."""

    or_text: bool = False

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"anyOf": [_OBJECT, {"type": "string"}]} if self.or_text else dict(_OBJECT)

    def _check(self, value: object) -> str:
        if isinstance(value, dict):
            return as_text(value)
        if isinstance(value, str) and self.or_text:
            return value
        raise wrong("must be a JSON schema: an object")


@dataclass(frozen=True, slots=True)
class Choices:
    """A list of strings."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        strings = core_schema.list_schema(
            core_schema.str_schema(strict=True), min_length=1, max_length=_MAX_CHOICES, fail_fast=True
        )
        return explained(strings, f"must be a list of 1 to {_MAX_CHOICES} strings")


@dataclass(frozen=True, slots=True)
class OnlyTrue:
    """true."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"const": True, "type": "boolean"}

    def _check(self, value: object) -> bool:
        if value is not True:  # a literal would take 1 and 1.0, too
            raise wrong("must be true")
        return value


class NamedSchema(RequestModel):
    """OpenAI's json_schema object."""

    name: Annotated[
        str,
        Text(pattern="^[a-zA-Z0-9_-]{1,64}$", text="must be 1 to 64 letters, digits, underscores or hyphens"),
    ]
    schema_: Annotated[str, JsonSchema(), Field(alias="schema")]
    description: Annotated[str, Text(_MAX_DESCRIPTION), Field(description="For readers.")] = ""
    strict: Annotated[
        bool, Boolean(), Field(description="Changes nothing: an answer always follows the schema.")
    ] = False


class ResponseFormat(RequestModel):
    """OpenAI's ``response_format``."""

    type: Annotated[str, OneOf(_FORMATS, "must be text, json_object or json_schema")]
    json_schema: NamedSchema | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        """``json_schema`` belongs to the type of that name, and to no other."""
        model = super().__get_pydantic_json_schema__(schema, handler)
        described = next(one for one in model["properties"]["json_schema"]["anyOf"] if "$ref" in one)
        named = {"type": {"const": "json_schema"}, "json_schema": described}
        return {
            "anyOf": [
                closed({"type": {"enum": ["text", "json_object"]}}, ["type"]),
                closed(named, ["type", "json_schema"]),
            ]
        }

    def wanted(self) -> GrammarRequest | None:
        """The constraint; None for text. Raises ApiError."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise bad_field("response_format.json_schema", "is required")
            param = "response_format.json_schema.schema"
            return GrammarRequest(GrammarKind.JSON, self.json_schema.schema_, param)
        if self.json_schema is not None:
            raise bad_field("response_format.json_schema", "is not a known or supported field")
        return (
            GrammarRequest(GrammarKind.JSON, ANY_OBJECT, "response_format")
            if self.type == "json_object"
            else None
        )


class StructuredOutputs(RequestModel):
    """vLLM's ``structured_outputs``: exactly one of its fields."""

    json_: Annotated[str | None, JsonSchema(or_text=True), Field(alias="json")] = None
    regex: Annotated[str | None, Text()] = None
    choice: Annotated[list[str] | None, Choices()] = None
    grammar: Annotated[str | None, Text()] = None
    json_object: Annotated[bool | None, OnlyTrue()] = None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        """One alternative for each field."""
        properties = handler.resolve_ref_schema(handler(schema))["properties"]
        for field in properties.values():
            for key in ("title", "default"):
                field.pop(key, None)
        return {"anyOf": [closed({name: field}, [name]) for name, field in properties.items()]}

    def wanted(self) -> GrammarRequest:
        """The constraint. Raises ApiError."""
        given = self.model_dump(by_alias=True, exclude_unset=True)
        if len(given) != 1:
            names = ", ".join(str(field.alias or name) for name, field in type(self).model_fields.items())
            raise bad_field("structured_outputs", f"must have exactly one of {names}")
        ((name, value),) = given.items()
        param = f"structured_outputs.{name}"
        if name == "json_object":
            return GrammarRequest(GrammarKind.JSON, ANY_OBJECT, param)
        return GrammarRequest(GrammarKind(name), json.dumps(value) if name == "choice" else value, param)


def closed(properties: dict[str, Any], required: list[str]) -> Json:
    """The schema of an object without other fields; of those only null passes."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": {"type": "null"},
    }


def wanted_form(
    by_field: GrammarRequest | None, structured_outputs: StructuredOutputs | None, *, ignore_eos: bool
) -> GrammarRequest | None:
    """What constrains the answer: ``by_field`` of the API's own, or ours; at most one may. Raises
    ApiError.
    """
    by_outputs = None if structured_outputs is None else structured_outputs.wanted()
    if by_field is not None and by_outputs is not None:
        field = by_field.param.partition(".")[0]
        raise bad_field("structured_outputs", f"contradicts {field}; send one of them")
    wanted = by_field or by_outputs
    if wanted is not None and ignore_eos:
        raise bad_field("ignore_eos", f"is not supported together with {wanted.param}: it would have no end")
    return wanted
