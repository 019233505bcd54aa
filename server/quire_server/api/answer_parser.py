"""What the text of one answer is in OpenAI's words: content, reasoning, and calls with their ids.

Ids follow from the answer's, so that another server that goes on with it gives the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from quire_server.text.output_parsers import Arguments, CallName, OutputParser, Piece, Reasoning, Text

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 24


class CallDelta(NamedTuple):
    """What a call gained: first its id and name, then arguments."""

    number: int  # of the call
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class Parsed(NamedTuple):
    """What a text holds. ``num_reasoning``: its tokens in a thought, with those that begin and end it."""

    content: str
    reasoning: str
    calls: tuple[CallDelta, ...]
    num_reasoning: int


class AnswerParser:
    """``answer``: identifies it. ``id_length``: of the ids that the model's templates take, 0 for any."""

    def __init__(self, parser: OutputParser, answer: str, id_length: int = 0) -> None:
        self._parser = parser
        self._answer = answer
        self._id_length = id_length
        self.num_calls = 0

    def push(self, texts: Sequence[str], *, is_last: bool = False) -> Parsed:
        """What is certain with these texts, one for each token."""
        pieces, num_reasoning = list[Piece](), 0
        for text in texts:
            was_thinking = self._parser.is_thinking
            pieces += self._parser.push(text)
            num_reasoning += was_thinking or self._parser.is_thinking
        return self._parsed(pieces + self._parser.finish() if is_last else pieces, num_reasoning)

    def _parsed(self, pieces: list[Piece], num_reasoning: int) -> Parsed:
        content, reasoning, calls = "", "", list[CallDelta]()
        for piece in pieces:
            match piece:
                case Text(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallName(name):
                    calls.append(CallDelta(self.num_calls, self._new_id(), name))
                    self.num_calls += 1
                case Arguments(text):
                    calls.append(CallDelta(self.num_calls - 1, arguments=text))
        return Parsed(content, reasoning, tuple(calls), num_reasoning)

    def _new_id(self) -> str:
        return call_id(f"{self._answer} {self.num_calls}", self._id_length)


def call_id(seed: str, length: int) -> str:
    """An id that follows from a text: `call_...`, or so many letters and digits."""
    number = int.from_bytes(hashlib.sha256(seed.encode(errors="surrogatepass")).digest())
    letters = ""
    for _ in range(length or _ID_LENGTH):
        number, letter = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[letter]
    return letters if length else f"call_{letters}"
