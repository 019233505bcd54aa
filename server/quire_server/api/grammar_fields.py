"""What a request says about the form of its answer: OpenAI's ``response_format`` and vLLM's
``structured_outputs``. Called by `calls`. Pure: whether a schema or an expression is any good is found out by
``text.grammar_compiler``.
"""

from __future__ import annotations

import json
import re

from quire_server.api.errors import ApiError, bad_field
from quire_server.api.fields import Fields
from quire_server.core.request import GrammarKind
from quire_server.text.grammar_compiler import Wanted

_ANY_OBJECT = '{"type": "object"}'
KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_CHOICES = 1000
MAX_DESCRIPTION = 1 << 16
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def parse_form(fields: Fields) -> Wanted | None:
    """Takes both fields; at most one of them may ask for something. Raises ApiError."""
    asked = [
        wanted for wanted in (_response_format(fields), _structured_outputs(fields)) if wanted is not None
    ]
    if len(asked) > 1:
        raise bad_field("structured_outputs", "contradicts response_format; send one of them")
    return asked[0] if asked else None


def check_form(wanted: Wanted | None, *, ignore_eos: bool) -> None:
    """Refuse what has no meaning together."""
    if wanted is not None and ignore_eos:
        raise bad_field("ignore_eos", f"is not supported together with {wanted.param}: it would have no end")


def _response_format(fields: Fields) -> Wanted | None:
    form = fields.inner("response_format")
    if form is None:
        return None
    kind = form.take("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise form.error("type", "must be text, json_object or json_schema")
    wanted = None
    if kind == "json_object":
        wanted = Wanted(GrammarKind.JSON, _ANY_OBJECT, "response_format")
    if kind == "json_schema":
        wanted = _json_schema(form)
    form.end()
    return wanted


def _json_schema(form: Fields) -> Wanted:
    """``strict`` changes nothing: an answer always follows the schema."""
    described = form.inner("json_schema")
    if described is None:
        raise form.error("json_schema", "is required")
    name = described.take("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise described.error("name", "must be 1 to 64 letters, digits, underscores or hyphens")
    described.text("description", "", MAX_DESCRIPTION)
    described.boolean("strict", default=False)
    schema = described.take("schema")
    if not isinstance(schema, dict):
        raise described.error("schema", "must be a JSON schema: an object")
    described.end()
    return Wanted(GrammarKind.JSON, json.dumps(schema), "response_format.json_schema.schema")


def _structured_outputs(fields: Fields) -> Wanted | None:
    outputs = fields.inner("structured_outputs")
    if outputs is None:
        return None
    given = [(name, value) for name in KINDS if (value := outputs.take(name)) is not None]
    outputs.end()
    if len(given) != 1:
        raise bad_field("structured_outputs", f"must have exactly one of {', '.join(KINDS)}")
    name, value = given[0]
    param = f"structured_outputs.{name}"
    if name == "json_object":
        if value is not True:
            raise outputs.error(name, "must be true")
        return Wanted(GrammarKind.JSON, _ANY_OBJECT, param)
    return Wanted(GrammarKind(name), _text(outputs, name, value), param)


def _text(outputs: Fields, name: str, value: object) -> str:
    if name == "choice":
        return _choices(outputs.error(name, f"must be a list of 1 to {MAX_CHOICES} strings"), value)
    if name == "json" and isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        raise outputs.error(
            name, "must be a string" if name != "json" else "must be a JSON schema: an object"
        )
    return value


def _choices(wrong: ApiError, value: object) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise wrong
    if not all(isinstance(choice, str) for choice in value):
        raise wrong
    return json.dumps(value)
