"""EBNF as in llama.cpp (GBNF) and vLLM -> the Lark dialect of llguidance. Pure functions.

    root ::= "SELECT " column ("," column)*
    column ::= [a-z_]+          # a comment

A rule that is not recursive, directly or indirectly, becomes one terminal: one regular expression, which the
lexer matches exactly. Recursive rules stay rules; in them, neighbouring parts without recursion are merged
into the longest possible terminal.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MAX_DEPTH = 100
_MAX_REPETITION = 10_000
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)
      | (?P<rule>[A-Za-z_][\w-]*\s*::=)
      | (?P<name>[A-Za-z_][\w-]*)
      | (?P<literal>"(?:[^"\\\r\n]|\\.)*")
      | (?P<set>\[\^?(?:[^\]\\\r\n]|\\.)*\])
      | (?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})
      | (?P<mark>[.|()])""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {one: one for one in "\"'\\[]^-/"}


class EbnfError(ValueError):
    """The text is no grammar; the message says where and why."""


@dataclass
class _Node:
    """Part of a rule: a terminal's text, a reference, or an operator over parts."""

    operator: str  # "text", "name", "or", "then", or the repetition operator
    text: str = ""
    parts: list["_Node"] = field(default_factory=list)


def to_lark(text: str) -> str:
    """A Lark grammar whose ``start`` is the rule ``root``. Raises EbnfError."""
    rules = _EbnfParser(text).rules()
    if "root" not in rules:
        raise EbnfError("there is no rule named root")
    used = {name: set(_names(body)) for name, body in rules.items()}
    for name, others in used.items():
        for missing in others - rules.keys():
            raise EbnfError(f"the rule {name} uses {missing}, which is not defined")
    recursive = _recursive(used)
    numbers = {name: number for number, name in enumerate(rules)}

    def reference(name: str) -> str:
        return f"{'r' if name in recursive else 'T'}{numbers[name]}"

    lifted: list[str] = []

    def lift(expression: str) -> str:
        lifted.append(f"P{len(lifted)}: {expression}")
        return f"P{len(lifted) - 1}"

    lines = [f"start: {reference('root')}"]
    for name, body in rules.items():
        is_rule = name in recursive
        lines.append(f"{reference(name)}: {_write(body, reference, recursive, lift if is_rule else None)}")
    return "\n".join(lines + lifted)


def _names(node: _Node) -> Iterator[str]:
    if node.operator == "name":
        yield node.text
    for part in node.parts:
        yield from _names(part)


def _recursive(used: dict[str, set[str]]) -> set[str]:
    """Rules from which a recursive rule can be reached."""
    users: dict[str, set[str]] = {name: set() for name in used}
    for name, others in used.items():
        for other in others:
            users[other].add(name)
    left = {name: len(others) for name, others in used.items()}
    done = [name for name, count in left.items() if count == 0]
    for name in done:  # the loop appends to it
        for user in users[name]:
            left[user] -= 1
            if left[user] == 0:
                done.append(user)
    return used.keys() - set(done)


def _write(
    node: _Node,
    reference: Callable[[str], str],
    recursive: set[str],
    lift: Callable[[str], str] | None,
) -> str:
    """Lark text of a node. With ``lift`` the node is in a rule, and its parts without recursion become
    terminals.
    """
    if lift is not None and not any(name in recursive for name in _names(node)):
        return lift(_write(node, reference, recursive, None))
    if node.operator == "text":
        return node.text
    if node.operator == "name":
        return reference(node.text)
    if node.operator == "or":
        return "(" + " | ".join(_write(part, reference, recursive, lift) for part in node.parts) + ")"
    if node.operator == "then":
        parts = _merged(node.parts, recursive) if lift is not None else node.parts
        return "(" + (" ".join(_write(part, reference, recursive, lift) for part in parts) or '""') + ")"
    return _write(node.parts[0], reference, recursive, lift) + node.operator


def _merged(parts: list[_Node], recursive: set[str]) -> list[_Node]:
    """Merge neighbouring parts without recursion."""
    merged: list[_Node] = []
    was_plain = False
    for part in parts:
        is_plain = not any(name in recursive for name in _names(part))
        if is_plain and was_plain:
            merged[-1] = _Node("then", parts=[merged[-1], part])
        else:
            merged.append(part)
        was_plain = is_plain
    return merged


class _EbnfParser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise EbnfError(f"{_place(text, position)}: {text[position : position + 20]!r} is no token")
            if match.lastgroup != "space":
                self._tokens.append((str(match.lastgroup), match.group(), position))
            position = match.end()
        self._text = text
        self._next = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._next < len(self._tokens):
            kind, text, _ = self._tokens[self._next]
            if kind != "rule":
                raise self._error("a rule must begin here: name ::= ...")
            name = text[: -len("::=")].strip()
            if name in rules:
                raise self._error(f"the rule {name} is there already")
            self._next += 1
            rules[name] = self._alternatives(0)
        return rules

    def _alternatives(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self._error(f"parentheses are nested deeper than {_MAX_DEPTH}")
        alternatives = [self._sequence(depth)]
        while self._take("|"):
            alternatives.append(self._sequence(depth))
        return alternatives[0] if len(alternatives) == 1 else _Node("or", parts=alternatives)

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._next < len(self._tokens):
            kind, text, _ = self._tokens[self._next]
            if kind == "rule" or text in ("|", ")"):
                break
            self._next += 1
            if kind == "name":
                parts.append(_Node("name", text))
            elif kind == "literal":
                parts.append(_Node("text", self._literal(text)))
            elif kind == "set":
                parts.append(_Node("text", self._set(text)))
            elif text == ".":
                parts.append(_Node("text", "/(?s:.)/"))
            elif text == "(":
                parts.append(self._alternatives(depth + 1))
                if not self._take(")"):
                    raise self._error("a closing parenthesis is missing")
            elif parts:
                parts[-1] = _Node(self._repetition(text), parts=[parts[-1]])
            else:
                raise self._error(f"{text} repeats nothing")
        return parts[0] if len(parts) == 1 else _Node("then", parts=parts)

    def _take(self, mark: str) -> bool:
        if self._next < len(self._tokens) and self._tokens[self._next][:2] == ("mark", mark):
            self._next += 1
            return True
        return False

    def _literal(self, text: str) -> str:
        codes = [self._code(match) for match in _CHARACTER.finditer(text[1:-1])]
        return f"/{''.join(map(_hex, codes))}/" if codes else '""'

    def _set(self, text: str) -> str:
        negated = text.startswith("[^")
        items = list(_CHARACTER.finditer(text[2 if negated else 1 : -1]))
        ranges: list[tuple[int, int]] = []
        while items:
            low = high = self._code(items.pop(0))
            if len(items) >= 2 and items[0].group() == "-":
                high = self._code(items[1])
                del items[:2]
            if low > high:
                raise self._error(f"the range {chr(low)!r} to {chr(high)!r} is empty")
            ranges.append((low, high))
        if not ranges:
            raise self._error("a set of characters is empty")
        return f"/[{'^' if negated else ''}{''.join(f'{_hex(low)}-{_hex(high)}' for low, high in ranges)}]/"

    def _code(self, match: re.Match[str]) -> int:
        digits = match[1] or match[2] or match[3]
        if digits is None:
            if match[4] is not None and match[4] not in _ESCAPES:
                raise self._error(f"the escape \\{match[4]} is not known")
            return ord(_ESCAPES[match[4]] if match[4] is not None else match[5])
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"{match.group()} is no character")
        return code

    def _repetition(self, text: str) -> str:
        if not text.startswith("{"):
            return text
        bounds = [int(bound) for bound in text.strip("{}").split(",") if bound.strip()]
        if max(bounds) > _MAX_REPETITION or bounds != sorted(bounds):
            raise self._error(f"{text} must count upwards to {_MAX_REPETITION} at most")
        return "{" + ",".join(map(str, bounds)) + ("," if "," in text and len(bounds) == 1 else "") + "}"

    def _error(self, message: str) -> EbnfError:
        at = self._tokens[min(self._next, len(self._tokens) - 1)][2]
        return EbnfError(f"{_place(self._text, at)}: {message}")


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"


def _hex(code: int) -> str:
    return f"\\x{{{code:x}}}"
