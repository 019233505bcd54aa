"""One call as a JSON object: `{"name": "f", "arguments": {...}}`, as most families write it.

Where the name comes first, the arguments are sent as they come. Where it does not, the whole object is waited
for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from quire_server.text.output_parsers.feed import MAX_HELD, Feed, Steps
from quire_server.text.output_parsers.json_scanner import JsonScanner
from quire_server.text.output_parsers.pieces import Arguments, CallName

_MAX_HEADER = 512
_BEGIN = re.compile(r'\s*\{\s*"([^"\\]*)"\s*:')
_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


def call_object(feed: Feed, names: Collection[str]) -> Steps[bool]:
    """Read a call of one of the names from where the feed has looked to. False, and nothing consumed, where
    there is none.
    """
    begin, scanner, position = feed.at, JsonScanner(), feed.at
    while True:
        _, position = scanner.scan(feed.text, position)
        head = feed.text[begin : begin + _MAX_HEADER]
        if (header := _HEADER.match(head)) is not None:
            if header[1] not in names:
                return False
            feed.at = begin + header.end()
            yield from _stream(feed, header[1])
            return True
        if (first := _BEGIN.match(head)) is not None and first[1] not in _KEYS:
            return False
        if scanner.is_complete:
            return _whole(feed, begin, position, names)
        if scanner.is_broken or position - begin > MAX_HELD or not (yield from feed.more()):
            return False


def object_of_arguments(feed: Feed, name: str) -> Steps[bool]:
    """Send the object of arguments that comes next as it comes. False where it is broken or ends early."""
    feed.consume()
    feed.emit(CallName(name))
    scanner = JsonScanner()
    while True:
        arguments, feed.at = scanner.scan(feed.text)
        feed.emit(Arguments(arguments))
        feed.consume()
        if scanner.is_complete:
            return True
        if scanner.is_broken or not (yield from feed.more()):
            return False


def _stream(feed: Feed, name: str) -> Steps[None]:
    """Send the arguments, and drop the rest of the object."""
    if not (yield from object_of_arguments(feed, name)):
        return
    scanner = JsonScanner(inside=True)
    while True:
        _, feed.at = scanner.scan(feed.text)
        if scanner.is_broken:
            feed.at = 0
            return
        feed.consume()
        if scanner.is_complete or not (yield from feed.more()):
            return


def _whole(feed: Feed, begin: int, end: int, names: Collection[str]) -> bool:
    try:
        found = json.loads(feed.text[begin:end], strict=False)
    except (ValueError, RecursionError):
        return False
    arguments = next((found[key] for key in _ARGUMENTS if key in found), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    if found.get("name") not in names or not isinstance(arguments, dict | None):
        return False
    try:
        written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        written.encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return False
    feed.at = end
    feed.consume()
    feed.emit(CallName(found["name"]))
    feed.emit(Arguments(written))
    return True
