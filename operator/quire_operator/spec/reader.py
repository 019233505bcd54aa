"""Reads plain dicts into frozen dataclasses, driven by the fields' types and metadata.

One generic reader, so that a new field needs a line in `schema` and no code. It checks what an OpenAPI schema
can express (types, bounds, enumerations, patterns, unknown fields) and no rule across fields; its errors
carry the path.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from quire_operator import quantity
from quire_operator.errors import QuantityError, SpecError

T = TypeVar("T")


def camel(name: str) -> str:
    """The property's name in YAML: max_model_len -> maxModelLen, kv_cache -> kvCache."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def read(cls: type[T], value: object, path: str) -> T:
    """Read `value` as the dataclass `cls`; `path`: its field path, for errors."""
    if not isinstance(value, Mapping):
        raise SpecError(path, "required" if value is None else "expected an object")
    known = _fields(cls)  # type: ignore[arg-type]  # every type is hashable
    for key in value:
        if key not in known:
            raise SpecError(f"{path}.{key}", f"unknown field; known here: {', '.join(sorted(known))}")
    given = {}
    for key, (item, hint) in known.items():
        if value.get(key) is not None:
            given[item.name] = _value(hint, value[key], f"{path}.{key}", item.metadata)
        elif _is_required(item):
            raise SpecError(f"{path}.{key}", "required")
    return cls(**given)


@cache
def _fields(cls: type) -> dict[str, tuple[Field[Any], Any]]:
    """Every field of a dataclass with its type, by its name in YAML; cached, because resolving type hints is
    slow.
    """
    hints = typing.get_type_hints(cls)
    return {camel(item.name): (item, hints[item.name]) for item in fields(cls)}


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _value(hint: Any, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
    if typing.get_origin(hint) is types.UnionType:  # X | None: absent was handled by the caller
        hint = typing.get_args(hint)[0]
    if is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value, path)
    if limits.get("quantity"):
        return _quantity(value, path, limits)
    match typing.get_origin(hint) or hint:
        case builtin if builtin is bool:
            return _instance(bool, value, path, "expected true or false")
        case builtin if builtin is int:
            return _integer(value, path, limits)
        case builtin if builtin is str:
            return _string(value, path, limits)
        case builtin if builtin is tuple:
            return _sequence(typing.get_args(hint)[0], value, path, limits)
        case _:
            return _mapping(value, path, limits)


def _instance(cls: type[T], value: Any, path: str, otherwise: str) -> T:
    if not isinstance(value, cls):
        raise SpecError(path, f"{otherwise}, not {value!r:.80}")
    return value


def _integer(value: Any, path: str, limits: Mapping[str, Any]) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(path, f"expected a whole number, not {value!r:.80}")
    if not limits["minimum"] <= value <= limits["maximum"]:
        raise SpecError(path, f"expected {limits['minimum']} to {limits['maximum']}, not {value}")
    return value


def _string(value: Any, path: str, limits: Mapping[str, Any]) -> str:
    text = _instance(str, value, path, "expected text (quote it)")
    if "enum" in limits and text not in limits["enum"]:
        raise SpecError(path, f"expected one of {', '.join(limits['enum'])}, not {text!r:.80}")
    if len(text) < limits.get("minLength", 0):
        raise SpecError(path, "must not be empty")
    if "maxLength" in limits and len(text) > limits["maxLength"]:
        raise SpecError(path, f"longer than {limits['maxLength']} characters")
    if "pattern" in limits and not re.fullmatch(limits["pattern"], text):
        raise SpecError(path, f"{text!r:.80} does not match {limits['pattern']}")
    return text


def _quantity(value: Any, path: str, limits: Mapping[str, Any]) -> str:
    """A number or text, as the API server accepts both; kept in canonical form."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise SpecError(path, f"expected a quantity such as 2, 500m or '0.5' (quoted), not {value!r:.80}")
    if value == limits.get("or"):
        return str(value)
    try:
        return quantity.canonical(str(value))
    except QuantityError as error:
        raise SpecError(path, str(error)) from error


def _sequence(hint: Any, value: Any, path: str, limits: Mapping[str, Any]) -> tuple[Any, ...]:
    items = _instance(list, value, path, "expected a list")
    if len(items) < limits.get("minItems", 0):
        raise SpecError(path, f"fewer than {limits['minItems']} items")
    if len(items) > limits["maxItems"]:
        raise SpecError(path, f"more than {limits['maxItems']} items")
    inner = limits.get("items", {})
    return tuple(_value(hint, item, f"{path}[{index}]", inner) for index, item in enumerate(items))


def _mapping(value: Any, path: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    entries = _instance(Mapping, value, path, "expected an object")  # type: ignore[type-abstract]  # isinstance only
    if "additionalProperties" not in limits:
        return dict(entries)
    if len(entries) > limits["maxProperties"]:
        raise SpecError(path, f"more than {limits['maxProperties']} entries")
    return {
        key: _string(text, f"{path}.{key}", limits["additionalProperties"]) for key, text in entries.items()
    }
