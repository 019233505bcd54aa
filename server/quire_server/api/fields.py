"""Reads a JSON object field by field and refuses what is left: unknown fields are a 400, never ignored.

Called by `calls` and `generation_fields`. A null is the same as an absent field, as OpenAI's clients send
it. Each error names its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from quire_server.api.errors import ApiError, bad_field

INT64 = 2**63
_MAX_SHOWN = 256  # of an unknown field's name


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object of a request's body."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()  # an escaped lone surrogate is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The fields of one object that nobody has taken yet."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        """Whether a field is there and not taken yet."""
        return name in self._values

    def take(self, name: str) -> object:
        """Any value, None when absent."""
        return self._values.pop(name, None)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number between two bounds."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer between {low} and {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number between two bounds."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"must be a number between {low:g} and {high:g}")
        return float(value)

    def text(self, name: str, default: str, max_length: int) -> str:
        """A string up to a length."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > max_length:
            raise self.error(name, f"must be a string of at most {max_length} characters")
        return value

    def integers(self, name: str, max_length: int, below: int) -> tuple[int, ...]:
        """A list of whole numbers in [0, below)."""
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > max_length or not is_token_ids(value, below):
            raise self.error(name, f"must be a list of at most {max_length} integers in 0..{below - 1}")
        return tuple(value)

    def inner(self, name: str) -> Fields | None:
        """The fields of an object inside, None when absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(value, f"{self._prefix}{name}.")

    def only(self, name: str, allowed: Sequence[object]) -> None:
        """A known field of which this server supports only values that change nothing."""
        value = self.take(name)
        if value is None or any(type(value) is type(one) and value == one for one in allowed):
            return
        if isinstance(value, int) and any(isinstance(one, float) and value == one for one in allowed):
            return
        raise self.error(name, f"is not supported, except with the value {json.dumps(allowed[0])}")

    def end(self) -> None:
        """Refuse what is left."""
        for name in self._values:
            raise self.error(name[:_MAX_SHOWN], "is not a known or supported field")

    def error(self, name: str, message: str) -> ApiError:
        """A 400 about one field."""
        return bad_field(self._prefix + name, message)


def is_token_ids(value: Sequence[object], below: int) -> bool:
    """True for a list of token ids of the vocabulary."""
    if not set(map(type, value)) <= {int}:
        return False
    return all(isinstance(token, int) and 0 <= token < below for token in value)
