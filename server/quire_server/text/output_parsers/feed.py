"""The text of an answer as it comes, and what parsers of calls have in common.

A parser is a generator that yields where it needs more text, so that it reads like a parser of a whole text.
It looks ahead without consuming; what turns out to be no call is text again, without a lost character.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from quire_server.text.output_parsers.pieces import CallName, Piece, Reasoning, Text

MAX_HELD = 64 << 10  # characters of a call that is looked at before any of it is sent

T = TypeVar("T")
#: Yields where more text is needed.
Steps = Generator[None, None, T]


class Feed:
    """``text`` is what is not consumed, ``at`` how much of it the parser has looked at."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.kind: type[Text | Reasoning] = Text  # what released text is
        self.pieces: list[Piece] = []
        self.is_closed = False

    def more(self) -> Steps[bool]:
        """Wait for more text. False where none comes any more."""
        length = len(self.text)
        while len(self.text) == length:
            if self.is_closed:
                return False
            yield
        return True

    def emit(self, piece: Piece) -> None:
        """Add a piece, to the last one where it is of the same kind."""
        if isinstance(piece, CallName):
            self.pieces.append(piece)
            return
        if not piece.text:
            return
        last = self.pieces[-1] if self.pieces else None
        if type(last) is type(piece):
            self.pieces[-1] = type(piece)(last.text + piece.text)
        else:
            self.pieces.append(piece)

    def release(self, length: int) -> None:
        """So many characters are text, or of a thought."""
        self.emit(self.kind(self.text[:length]))
        self.text, self.at = self.text[length:], 0

    def consume(self) -> None:
        """What was looked at is a part of a call."""
        self.text, self.at = self.text[self.at :], 0

    def is_next(self, string: str) -> Steps[bool]:
        """Whether this comes next; it is looked at then."""
        while len(self.text) - self.at < len(string) and string.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                return False
        if self.text.startswith(string, self.at):
            self.at += len(string)
            return True
        return False

    def skip_space(self) -> Steps[str]:
        """Look at white space, and return the character that follows, empty at the end."""
        while True:
            while self.at < len(self.text):
                if not self.text[self.at].isspace():
                    return self.text[self.at]
                self.at += 1
            if not (yield from self.more()):
                return ""

    def text_until(self, *markers: str) -> Steps[str]:
        """Release the text up to the first of the markers, look at that and return it; empty at the end.
        White space before a marker is left to be a part of the call.
        """
        while True:
            found = [(position, one) for one in markers if (position := self.text.find(one)) >= 0]
            if found:
                position, marker = min(found)
                begin = len(self.text[:position].rstrip())
                self.release(begin)
                self.at = position - begin + len(marker)
                return marker
            held = max(_overlap(self.text, one) for one in markers)
            self.release(len(self.text[: len(self.text) - held].rstrip()))
            if not (yield from self.more()):
                self.release(len(self.text))
                return ""

    def rest_is_text(self) -> Steps[None]:
        """Release all that comes."""
        while True:
            self.release(len(self.text))
            if not (yield from self.more()):
                return


class OutputParser:
    """Runs a parser over an answer that comes in pieces."""

    def __init__(self, parse: Callable[[Feed], Steps[None]]) -> None:
        self._feed = Feed()
        self._steps: Steps[None] | None = parse(self._feed)
        self._run()

    @property
    def is_thinking(self) -> bool:
        """Whether the thought goes on."""
        return self._feed.kind is Reasoning

    def push(self, text: str) -> list[Piece]:
        """What is certain with this text."""
        self._feed.text += text
        return self._run()

    def finish(self) -> list[Piece]:
        """What is left, after the last text."""
        self._feed.is_closed = True
        return self._run()

    def _run(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:
            self._feed.release(len(self._feed.text))
        found, self._feed.pieces = self._feed.pieces, []
        return found


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
