"""Calls as Python writes them: `[f(city="Oslo"), g(1.5, None)]`; arguments by keyword, of literals alone.

A call is looked at whole, by Python's own parser, which evaluates nothing here.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection

from quire_server.text.output_parsers.feed import MAX_HELD, Feed, Steps
from quire_server.text.output_parsers.json_scanner import MAX_DEPTH
from quire_server.text.output_parsers.pieces import Arguments, CallName

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_NAME = 64
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def call_list(feed: Feed, names: Collection[str]) -> Steps[bool]:
    """Read `[f(...), g(...)]`. False where it has no call; what follows the last call is text."""
    if not (yield from feed.is_next("[")) or not (yield from call(feed, names)):
        return False
    while True:
        if (yield from feed.skip_space()) == "]":
            feed.at += 1
            feed.consume()
            return True
        if not (yield from feed.is_next(",")) or not (yield from call(feed, names)):
            return True


def call(feed: Feed, names: Collection[str]) -> Steps[bool]:
    """Read `f(...)`. False, and nothing consumed, where there is none."""
    yield from feed.skip_space()
    begin = feed.at
    while (name := _NAME.match(feed.text, begin)) is None or name.end() == len(feed.text):
        if name is None and begin < len(feed.text) or len(feed.text) - begin > _MAX_NAME:
            return False
        if not (yield from feed.more()):
            return False
    if name[0] not in names or feed.text[name.end()] != "(":
        return False
    end = yield from _end_of_brackets(feed, name.end())
    if end is None or (arguments := _keywords(feed.text[name.end() : end])) is None:
        return False
    feed.at = end
    feed.consume()
    feed.emit(CallName(name[0]))
    feed.emit(Arguments(arguments))
    return True


def _end_of_brackets(feed: Feed, position: int) -> Steps[int | None]:
    """Where the bracket that opens here is closed; None where it is not."""
    begin, brackets, quote, is_escaped = position, list[str](), "", False
    while True:
        while position < len(feed.text):
            character = feed.text[position]
            position += 1
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in _CLOSING:
                brackets.append(_CLOSING[character])
            elif character in ")]}":
                if brackets.pop() != character:
                    return None
                if not brackets:
                    return position
            if len(brackets) > MAX_DEPTH or position - begin > MAX_HELD:
                return None
        if not (yield from feed.more()):
            return None


def _keywords(brackets: str) -> str | None:
    """The arguments of a call as a JSON object; None where they are something else than keywords of
    literals.
    """
    try:
        body = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(body, ast.Call) or body.args or any(one.arg is None for one in body.keywords):
            return None
        found = {str(one.arg): ast.literal_eval(one.value) for one in body.keywords}
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
