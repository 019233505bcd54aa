"""The kinds of fields that a spec has, each with its default and bounds in the dataclass field's metadata.

The reader and the contract tests read them from there.
"""

from dataclasses import field
from typing import Any


def number(minimum: int, maximum: int, default: int) -> Any:
    """A whole number with a default."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def optional_number(minimum: int, maximum: int) -> Any:
    """An optional whole number."""
    return field(default=None, metadata={"minimum": minimum, "maximum": maximum})


def choice(*values: str) -> Any:
    """An enumeration; the first value is the default."""
    return field(default=values[0], metadata={"enum": list(values)})


def text(pattern: str, max_length: int) -> Any:
    """Optional text: absent and empty mean the same."""
    return field(default="", metadata={"pattern": f"^({pattern})?$", "maxLength": max_length})


def default_text(default: str, pattern: str, max_length: int) -> Any:
    """Text with a default, never empty."""
    return field(
        default=default, metadata={"pattern": f"^{pattern}$", "maxLength": max_length, "minLength": 1}
    )


def required_text(pattern: str, max_length: int) -> Any:
    """Required text."""
    return field(metadata={"pattern": f"^{pattern}$", "maxLength": max_length, "minLength": 1})


def texts(pattern: str, max_length: int, max_items: int) -> Any:
    """A list of texts."""
    each = {"pattern": f"^{pattern}$", "maxLength": max_length}
    return field(default=(), metadata={"maxItems": max_items, "items": each})


def items(max_items: int) -> Any:
    """A list of objects."""
    return field(default=(), metadata={"maxItems": max_items})


def mapping(pattern: str, max_length: int) -> Any:
    """Texts by name."""
    values = {"pattern": f"^({pattern})?$", "maxLength": max_length}
    return field(default_factory=dict, metadata={"maxProperties": 32, "additionalProperties": values})


def quantity() -> Any:
    """An optional Kubernetes quantity."""
    return field(default="", metadata={"quantity": True})


def required_quantity() -> Any:
    """A required quantity."""
    return field(metadata={"quantity": True})
