"""The few forms of JSON Schema in which requests are described, each as strict as the parser that it stands
beside.

Called by `openapi_requests`. A null is everywhere the same as an absent field (see `fields`), and each
description says so: where null is refused, the field is required. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Schema = dict[str, object]


def boolean(description: str, default: bool | None = None) -> Schema:
    """true or false."""
    return _optional({"type": ["boolean", "null"]}, description, default)


def integer(description: str, low: int, high: int, default: int | None = None) -> Schema:
    """A whole number between two bounds."""
    return _optional({"type": ["integer", "null"], "minimum": low, "maximum": high}, description, default)


def number(description: str, low: float, high: float, default: float | None = None) -> Schema:
    """A number between two bounds."""
    return _optional({"type": ["number", "null"], "minimum": low, "maximum": high}, description, default)


def positive(description: str, high: float, default: float | None = None) -> Schema:
    """A number above 0, up to a bound."""
    return _optional(
        {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": high}, description, default
    )


def text(description: str, max_length: int, default: str | None = None) -> Schema:
    """A string up to a length in characters."""
    return _optional({"type": ["string", "null"], "maxLength": max_length}, description, default)


def one_of(description: str, values: Sequence[object], default: object = None) -> Schema:
    """One of a few values."""
    return _optional({"enum": [*values, None]}, description, default)


def any_of(description: str, *choices: Schema) -> Schema:
    """Any of some forms."""
    return {"anyOf": [*choices, {"type": "null"}], "description": description}


def array(items: Schema, low: int, high: int) -> Schema:
    """A list, of so many items at least and at most."""
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def optional_array(description: str, items: Schema, low: int, high: int) -> Schema:
    """A list that may be null."""
    return {**array(items, low, high), "type": ["array", "null"], "description": description}


def closed(
    properties: Mapping[str, Schema], required: Sequence[str] = (), description: str = "", **more: object
) -> Schema:
    """An object without other fields. Of those only null passes, since clients write absent fields so."""
    schema: Schema = {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": {"type": "null"},
        **more,
    }
    if required:
        schema["required"] = list(required)
    if description:
        schema["description"] = description
    return schema


def token_id(vocab_size: int | None) -> Schema:
    """A token of the model, as far as its vocabulary is known."""
    return {"type": "integer", "minimum": 0, **({"maximum": vocab_size - 1} if vocab_size else {})}


def _optional(schema: Schema, description: str, default: object) -> Schema:
    return schema | {"description": description} | ({} if default is None else {"default": default})
