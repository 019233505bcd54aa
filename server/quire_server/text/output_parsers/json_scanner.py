"""Finds the end of a JSON object that arrives in pieces, and where it stops being one.

In time linear to its length, with a bounded depth: what models write is as untrusted as what clients send.
"""

from __future__ import annotations

import re

MAX_DEPTH = 64
_SPACE = frozenset(" \t\r\n")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_MAX_SCALAR = 64
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Scans one object. ``inside``: its beginning was scanned already, up to the end of a member."""

    def __init__(self, *, inside: bool = False) -> None:
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = ["{"] if inside else []
        self._expect = self._after_value if inside else self._first
        self._scalar = ""
        self._is_key = False
        self._num_hex = 0

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """Goes on with ``text[start:]``. Returns what of it belongs to the object, with control characters in
        strings escaped, as JSON wants them, and where it ended: the end of the text, or of the object, or the
        character that broke it.
        """
        found, position = [], start
        while position < len(text) and not self.is_complete:
            character = text[position]
            if not self._expect(character):
                self.is_broken = True
                break
            is_control = (
                character < " " and character not in _SPACE or character in "\t\r\n" and self._in_string
            )
            found.append(f"\\u{ord(character):04x}" if is_control else character)
            position += 1
        return "".join(found), position

    @property
    def _in_string(self) -> bool:
        return self._expect in (self._string, self._escape, self._hex)

    def _first(self, character: str) -> bool:
        return self._begin(character) if character == "{" else character in _SPACE

    def _begin(self, bracket: str) -> bool:
        self._open.append(bracket)
        self._expect = self._key_or_end if bracket == "{" else self._value_or_end
        return len(self._open) <= MAX_DEPTH

    def _end(self, bracket: str) -> bool:
        if _CLOSING[self._open.pop()] != bracket:
            return False
        self._expect = self._after_value
        self.is_complete = not self._open
        return True

    def _value(self, character: str) -> bool:
        if character in "{[":
            return self._begin(character)
        if character == '"':
            self._is_key, self._expect = False, self._string
            return True
        if character in _SPACE:
            return True
        self._scalar, self._expect = character, self._rest_of_scalar
        return character in "-0123456789tfn"

    def _value_or_end(self, character: str) -> bool:
        return self._end(character) if character == "]" else self._value(character)

    def _rest_of_scalar(self, character: str) -> bool:
        if character in ",]}" or character in _SPACE:
            if _SCALAR.fullmatch(self._scalar) is None:
                return False
            self._expect = self._after_value
            return self._after_value(character)
        self._scalar += character
        return len(self._scalar) <= _MAX_SCALAR

    def _key_or_end(self, character: str) -> bool:
        return self._end(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key, self._expect = True, self._string
            return True
        return character in _SPACE

    def _string(self, character: str) -> bool:
        if character == "\\":
            self._expect = self._escape
        elif character == '"':
            self._expect = self._colon if self._is_key else self._after_value
        return True

    def _escape(self, character: str) -> bool:
        self._num_hex, self._expect = 0, self._hex if character == "u" else self._string
        return character in _ESCAPED

    def _hex(self, character: str) -> bool:
        self._num_hex += 1
        if self._num_hex == 4:
            self._expect = self._string
        return character in _HEX

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._expect = self._value
            return True
        return character in _SPACE

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._expect = self._key if self._open[-1] == "{" else self._value
            return True
        return self._end(character) if character in "]}" else character in _SPACE
