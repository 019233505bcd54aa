"""Frozen dataclasses and named tuples as msgpack arrays, decoded strictly by their type annotations.

Whatever does not match the declared types exactly is a CodecError, so a peer can never make an object that
the code does not expect. The decoder of a type is compiled once, because the engine sends an event per token.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]  # ships no annotations

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class CodecError(ValueError):
    """Bytes that are not a valid message."""


def encode(message: Any) -> bytes:
    """The bytes of a message made of dataclasses, named tuples, tuples, enums and scalars."""
    packed: bytes = msgpack.packb(message, default=_fields, use_bin_type=True)
    return packed


def _fields(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def unpack(data: bytes) -> Any:
    """Plain values from bytes; raises CodecError."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises ten unrelated classes, RecursionError among them
        raise CodecError(f"not msgpack: {type(error).__name__}") from None


def decoder(kind: type[T]) -> Callable[[Any], T]:
    """A function from plain values to `kind`; raises CodecError. Compile it once, at import."""
    compiled = _compile(kind)

    def decode(value: Any) -> T:
        try:
            result: T = compiled(value)
        except CodecError:
            raise
        except (TypeError, ValueError) as error:
            raise CodecError(str(error)) from None
        return result

    return decode


def _compile(kind: Any) -> Decoder:
    origin = typing.get_origin(kind)
    if kind in (int, str, bool, bytes):
        return _exact(kind)
    if kind is float:
        return _float
    if origin in (typing.Union, types.UnionType):
        return _optional(kind)
    if origin is tuple:
        return _tuple(typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if dataclasses.is_dataclass(kind):
        return _record(kind, [field.name for field in dataclasses.fields(kind)])
    if hasattr(kind, "_fields"):
        return _record(kind, list(kind._fields))
    raise TypeError(f"{kind} cannot be encoded")


def _exact(kind: type) -> Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise CodecError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return decode


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise CodecError(f"expected float, got {type(value).__name__}")


def _optional(kind: Any) -> Decoder:
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if len(options) != 1:
        raise TypeError(f"{kind} cannot be encoded")
    inner = _compile(options[0])
    return lambda value: None if value is None else inner(value)


def _tuple(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(arguments[0])
    items = [_compile(argument) for argument in arguments]

    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            raise CodecError(f"expected {len(items)} items")
        return tuple([item(element) for item, element in zip(items, value, strict=True)])

    return decode


def _sequence(kind: Any) -> Decoder:
    item = _compile(kind)

    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise CodecError(f"expected a list, got {type(value).__name__}")
        return tuple([item(element) for element in value])

    def decode_scalars(value: Any) -> tuple[Any, ...]:
        # Prompts and batches are long: one pass in C over the types instead of a call for each item.
        if type(value) is not list or not set(map(type, value)) <= {kind}:
            raise CodecError(f"expected a list of {kind.__name__}")
        return tuple(value)

    return decode_scalars if kind in (int, str) else decode


def _record(kind: Any, names: list[str]) -> Decoder:
    hints = typing.get_type_hints(kind)
    items = [_compile(hints[name]) for name in names]

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise CodecError(f"expected {kind.__name__} with {len(items)} fields")
        return kind(*[item(element) for item, element in zip(items, value, strict=True)])

    return decode
