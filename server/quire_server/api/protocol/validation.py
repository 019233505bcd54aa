"""Validates a request's body with its pydantic model; the first failure becomes a 400 that names the field.

The types here carry their bounds and the text of their error, so that a client reads the same remedy for
every way in which a value is wrong. A null is the same as an absent field, as OpenAI's clients send it; an
unknown field is refused by name. Knows no route and no field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, from_json

from quire_http.errors import ApiError, bad_field

_MAX_SHOWN = 256  # characters of an unknown field's name
_EXPLAINED = "explained"
_IS_REQUIRED = "is required"
_TAG = "<"  # begins the name of a union's branch, which is no part of a field's path
#: The format of token ids in the JSON schema: their maximum is the vocabulary's, known once the engine is.
TOKEN_ID = "token-id"

Json = dict[str, Any]
_NULL: Json = {"type": "null"}
TOKEN: Json = {"type": "integer", "minimum": 0, "format": TOKEN_ID}
Vocabulary = ValidationInfo[int]
Model = TypeVar("Model", bound=BaseModel)


def parse_object(body: bytes | bytearray) -> Json:
    """The JSON object of a request's body. Raises ApiError.

    By pydantic's parser: it takes half the time of Python's, makes strings of the bytes without decoding all
    of them first, and refuses what is no text (a lone surrogate).
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return value


def validate(model: type[Model], values: Json, vocab_size: int = 0) -> Model:
    """The request; its token ids have to be below ``vocab_size``. Raises ApiError about the first field that
    is wrong.
    """
    try:
        return model.model_validate(values, context=vocab_size)
    except ValidationError as error:
        raise _refusal(model, values, error) from None


def _refusal(model: type[BaseModel], values: Json, error: ValidationError) -> ApiError:
    """About the first error in the route's own fields, then in those that routes share."""
    errors = error.errors(include_url=False, include_input=False)
    first = next((one for one in errors if one["loc"] and one["loc"][0] in model.__annotations__), errors[0])
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(_TAG):
            path += f".{part}" if path else part
    if (unknown := first.get("ctx", {}).get("unknown")) is not None:
        path += f".{unknown}" if path else unknown
    text = _TEXTS.get(first["type"], first["msg"])
    if text != _IS_REQUIRED and _is_absent(values, first["loc"]):
        text = f"{_IS_REQUIRED}, and {text}"
    return bad_field(path, text)


def as_text(value: object) -> str:
    """A JSON value that is kept or sent as it came. Raises the error of a field where a number of it reads as
    infinity, as 1e400 does, for which JSON has no form.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise wrong("has a number that is too large, such as 1e400: write one that a float64 holds") from None


def _is_absent(values: Any, path: Sequence[int | str]) -> bool:
    for part in path:
        if isinstance(values, dict) and isinstance(part, str):
            values = values if part.startswith(_TAG) else values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
    return values is None


_TEXTS = {"model_type": "must be an object"}


class RequestModel(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _names: ClassVar[frozenset[str]] = frozenset()
    _required: ClassVar[dict[str, None]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls._names = frozenset(fields)
        cls._required = {name: None for name, field in fields.items() if field.is_required()}

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: object, validate_fields: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop nulls, and refuse the first unknown field where the known ones are right.

        A required field that is absent is validated as null, so that its error says what it must be, too. Of
        unknown fields only the first is looked at: a hostile body has thousands of them.
        """
        if not isinstance(values, dict):
            return validate_fields(values)
        known = cls._required | {
            name: value for name, value in values.items() if value is not None and name in cls._names
        }
        model = validate_fields(known)
        for name, value in values.items():
            if value is not None and name not in cls._names:
                text = "is not a known or supported field"
                raise PydanticCustomError(_EXPLAINED, text, {"unknown": name[:_MAX_SHOWN]})
        return model

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        """As strict as the validation: null passes wherever a field may be absent, even an unknown one."""
        model = handler.resolve_ref_schema(handler(schema))
        required = model.get("required", [])
        fields = {name: dict(field) for name, field in model["properties"].items()}
        for field in fields.values():
            field.pop("title", None)
        model["properties"] = {name: fields[name] for name in required} | {
            name: nullable(field) for name, field in fields.items() if name not in required
        }
        model["additionalProperties"] = {"type": "null"}
        return model


def nullable(schema: Json) -> Json:
    """A schema that takes null, too; a default that is nothing (null, empty) is not shown."""
    schema = dict(schema)
    about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    if about.get("default") in (None, "", []):
        about.pop("default", None)
    if "enum" in schema:
        schema = {"enum": [*schema["enum"], None]}
    elif "const" in schema:
        schema = {"enum": [schema["const"], None]}
    elif isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    elif "anyOf" in schema:
        schema["anyOf"] = [*(one for one in schema["anyOf"] if one != _NULL), _NULL]
    else:
        schema = {"anyOf": [schema, _NULL]}
    return schema | about


def kind_of(
    *kinds: str | type,
    key: str = "type",
    names: Mapping[str, str] | None = None,
    default: str = "",
    text: str = "",
) -> Discriminator:
    """Which branch of a union a value is: by its type in Python, text or list, or by the ``key`` of an
    object, which is the ``default`` where it has none. The branches' tags are these kinds in angle brackets,
    or their ``names``.
    """
    words: dict[type, str] = {str: "text", list: "list"}
    known = {one: (names or {}).get(one, one) for one in kinds if isinstance(one, str)}

    def find(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"<{words[type(value)]}>" if type(value) in kinds else None
        found = default if value.get(key) is None else value[key]
        name = known.get(found) if isinstance(found, str) else None
        return None if name is None else f"<{name}>"

    return Discriminator(
        find,
        custom_error_type=_EXPLAINED,
        custom_error_message=text or "must be a string or a list of text blocks",
    )


def explained(schema: CoreSchema, text: str) -> CoreSchema:
    """A schema whose every failure is one error with this text."""
    return core_schema.custom_error_schema(schema, custom_error_type=_EXPLAINED, custom_error_message=text)


@dataclass(frozen=True, slots=True)
class Boolean:
    """true or false."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return explained(core_schema.bool_schema(strict=True), "must be true or false")


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number between two bounds."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.int_schema(strict=True, ge=self.low, le=self.high)
        return explained(schema, f"must be an integer between {self.low} and {self.high}")


@dataclass(frozen=True, slots=True)
class Number:
    """A number between two bounds, the lower one excluded where ``above_low``."""

    low: float
    high: float
    above_low: bool = False

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = f"must be a number between {self.low:g} and {self.high:g}"
        schema = explained(core_schema.float_schema(strict=True, ge=self.low, le=self.high), text)
        if not self.above_low:
            return schema
        return core_schema.no_info_after_validator_function(self._check_above_low, schema)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        low = "exclusiveMinimum" if self.above_low else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}

    def _check_above_low(self, value: float) -> float:
        if value <= self.low:
            raise wrong(f"must be more than {self.low:g}")
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A string of a bounded length in characters; not an empty one where ``required``."""

    max_length: int | None = None
    required: bool = False
    pattern: str | None = None
    text: str = ""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        least = 1 if self.required else None
        schema = core_schema.str_schema(
            strict=True, min_length=least, max_length=self.max_length, pattern=self.pattern
        )
        bound = "" if self.max_length is None else f" of at most {self.max_length} characters"
        bounded = explained(schema, self.text or f"must be a string{bound}")
        if not self.required:
            return bounded
        return core_schema.no_info_before_validator_function(_present, bounded)


def _present(value: object) -> object:
    if value is None or value == "":
        raise wrong(_IS_REQUIRED)
    return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few strings."""

    values: tuple[str, ...]
    text: str = ""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        words = ", ".join(self.values)
        many = len(self.values) > 1
        text = f"must be one of {words}" if many else f"must be {json.dumps(words)}"
        return explained(core_schema.literal_schema(list(self.values)), self.text or text)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids of the vocabulary; a tuple of them."""

    max_items: int
    min_items: int = 0

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        least = {"minItems": self.min_items} if self.min_items else {}
        return {"type": "array", "items": dict(TOKEN), **least, "maxItems": self.max_items}

    def _check(self, value: object, info: Vocabulary) -> tuple[int, ...]:
        if value is None:
            raise wrong(_IS_REQUIRED)
        if value == [] and self.min_items:
            raise wrong("must not be empty: no token could be chosen")
        vocab_size = info.context
        if not isinstance(value, list) or len(value) > self.max_items or not is_token_ids(value, vocab_size):
            raise wrong(f"must be a list of at most {self.max_items} integers in 0..{vocab_size - 1}")
        return tuple(value)


def is_token_ids(value: Sequence[object], vocab_size: int) -> bool:
    """True for a list of token ids of the vocabulary."""
    if not set(map(type, value)) <= {int}:
        return False
    numbers: Sequence[Any] = value
    return not value or (min(numbers) >= 0 and max(numbers) < vocab_size)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of a bounded length whose items report their own errors."""

    low: int
    high: int
    items: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {**handler(schema), "minItems": self.low, "maxItems": self.high}

    def _check(self, value: object) -> object:
        if not isinstance(value, list) or not self.low <= len(value) <= self.high:
            raise wrong(f"must be a list of {self.low} to {self.high} {self.items}")
        return value


@dataclass(frozen=True, eq=False)  # by identity: `Annotated` would take the values 1 and True for the same
class Neutral:
    """A known field that is not implemented: only values that change nothing are accepted."""

    values: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        about = "Known, but not implemented: only values that change nothing are accepted."
        return {"enum": list(self.values), "description": about}

    def _check(self, value: object) -> object:
        if any(type(value) is type(one) and value == one for one in self.values):
            return value
        accepted = " or ".join(json.dumps(value) for value in self.values)
        raise wrong("is not supported" + (f", except with the value {accepted}" if accepted else ""))


@dataclass(frozen=True, slots=True)
class Strings:
    """A string or a list of strings, each of a bounded length; a tuple of them."""

    max_items: int
    max_length: int
    pattern: str | None = None  # in the JSON schema; checked where the strings are used

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        string: Json = {"type": "string", "minLength": 1, "maxLength": self.max_length}
        if self.pattern is not None:
            string["pattern"] = self.pattern
        many = {"type": "array", "items": string, "minItems": 0, "maxItems": self.max_items}
        return {"anyOf": [string, many]}

    def _check(self, value: object) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or len(strings) > self.max_items:
            text = f"must be a string or a list of at most {self.max_items} strings"
            raise wrong(text)
        if not all(isinstance(one, str) and 0 < len(one) <= self.max_length for one in strings):
            text = f"must hold strings of 1 to {self.max_length} characters"
            raise wrong(text)
        return tuple(strings)


@dataclass(frozen=True, slots=True)
class Labels:
    """An object of strings, each of a bounded length, as their names are."""

    max_items: int
    max_length: int
    max_name: int

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        string: Json = {"type": "string", "maxLength": self.max_length}
        names = {"propertyNames": {"maxLength": self.max_name}}
        return {"type": "object", "maxProperties": self.max_items, "additionalProperties": string, **names}

    def _check(self, value: object) -> object:
        if not isinstance(value, dict) or len(value) > self.max_items:
            raise wrong(f"must be an object of at most {self.max_items} strings")
        if not all(isinstance(one, str) and len(one) <= self.max_length for one in value.values()):
            raise wrong(f"must hold strings of at most {self.max_length} characters")
        if not all(len(name) <= self.max_name for name in value):
            raise wrong(f"must have names of at most {self.max_name} characters")
        return value


def wrong(text: str) -> PydanticCustomError:
    """The error of a validator of its own."""
    return PydanticCustomError(_EXPLAINED, text)
