"""Differences between two documents, and documents as YAML, without a library.

Pure. The plugin depends on Python and kubectl only, so it has its own YAML writer: maps and lists in block
style, ambiguous texts in quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
_TO_ESCAPE = re.compile(
    "[^\x00-\x7e\U00010000-\U0010ffff]"
)  # YAML cannot escape characters beyond the BMP this way
_ABSENT = object()
_MOST_TEXT = 60


def between(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """`path: old -> new` for each changed field; lists of different lengths are compared as one value."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{path}.{key}" if path else str(key)
            yield from between(old.get(key, _ABSENT), new.get(key, _ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from between(*pair, f"{path}[{index}]")
    elif old != new:
        yield f"{path}: {_short(old)} -> {_short(new)}"


def yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """One YAML stream."""
    return "".join("---\n" + "\n".join(_block(document, "")) + "\n" for document in documents)


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = _scalar(value) if isinstance(value, str) else json.dumps(value, separators=(", ", ": "))
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


def _block(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", inner, f"{indent}  ")
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            first, *rest = _block(inner, f"{indent}  ")
            yield f"{indent}- {first.lstrip(' ')}"
            yield from rest
    else:
        yield f"{indent}{_scalar(value)}"


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from _block(value, indent)
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _TO_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
