"""What the JSON of a body will take: its number of values, and memory, counted while its bytes come.

Parsing holds the interpreter's lock until it ends, and turns a byte of JSON into up to a hundred bytes of
objects. So both are bounded before anything is parsed. Counts strings as they are delimited and parses
nothing: what is not JSON is counted somehow, and is refused when it is parsed.
"""

from __future__ import annotations

#: An object or a list counts as so many numbers: that is what it takes, in time and in memory.
CONTAINER_WEIGHT = 10
#: The body and its text.
LEAST_MEMORY_PER_BYTE = 2
_BYTES_PER_VALUE = 64  # a small integer, or the header of a string, and its places in a list and a tuple
_PIECE = 64 * 1024  # bytes that are counted at once, in less than a millisecond
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_FOUR_BYTES = bytes(range(0xF0, 0xF8))  # begin a character that is four bytes of UTF-8


class BodySize:
    """The counts of one body, as far as it has come."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._characters = 0
        self._separators = 0
        self._containers = 0
        self._width = 1  # bytes of a character in a string that has the widest one so far
        self._in_string = False
        self._after_backslash = False

    @property
    def num_values(self) -> int:
        """The values so far; a container counts CONTAINER_WEIGHT."""
        return self._separators + CONTAINER_WEIGHT * self._containers

    @property
    def memory(self) -> int:
        """Bytes that the body takes: itself and its text until it is parsed, then its text and the prompt
        that is made of it; and its values. One character beyond the BMP makes a whole string four bytes wide.
        """
        text = self._characters * self._width
        return text + max(self.num_bytes, text) + _BYTES_PER_VALUE * self.num_values

    def add(self, data: bytes) -> None:
        """Count the next bytes."""
        self.num_bytes += len(data)
        if len(data) <= _PIECE:
            self._add_piece(data)
            return
        for start in range(0, len(data), _PIECE):
            self._add_piece(data[start : start + _PIECE])

    def _add_piece(self, piece: bytes) -> None:
        self._characters += len(piece)
        if not piece.isascii():
            self._characters -= len(piece) - len(piece.translate(None, _CONTINUATION))
            is_wide = len(piece.translate(None, _FOUR_BYTES)) < len(piece)
            self._width = max(self._width, 4 if is_wide else 2)
        if self._after_backslash or b"\\" in piece:
            piece = self._without_escapes(piece)
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self._containers += outside.count(b"[") + outside.count(b"{")
        self._separators += outside.count(b",")

    def _without_escapes(self, piece: bytes) -> bytes:
        """The piece without escaped quotes and backslashes. An escape may be cut in two."""
        if self._after_backslash:
            if piece[:1] == b"u":
                self._width = 4
            piece = piece[1:]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._after_backslash = piece.endswith(b"\\")
        if b"\\u" in piece:
            self._width = 4  # it may be the half of any character
        return piece
