"""Drafts for nothing: what followed the last time the newest tokens stood in the same order, in the prompt or
in the answer itself. Called by ``speculation``; knows one sequence of tokens.

Prompt look-up decoding (Saxena 2023); the search is ``bytes.rfind``, some microseconds at thousands of
tokens.
"""

from array import array
from collections.abc import Sequence

_WIDTH = array("i").itemsize


class PromptLookup:
    """The tokens of one request as bytes; they only ever grow."""

    __slots__ = ("_known", "_length", "_longest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        """Look for the last ``longest`` tokens first, and for as few as ``shortest``."""
        self._shortest, self._longest = shortest, longest
        self._known = bytearray()
        self._length = 0

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """``count`` tokens that may come next, or none. The latest match of the most tokens counts; a match
        that reaches to the end is a cycle, which goes on.
        """
        length = len(tokens)
        self._known += array("i", tokens[self._length :]).tobytes()
        self._length = length
        start = self._find(self._shortest)
        if start < 0:
            return ()
        for size in range(min(self._longest, length - 1), self._shortest, -1):
            if (better := self._find(size)) >= 0:
                start = better
                break
        period = length - start
        if period >= count:
            return tuple(tokens[start : start + count])
        return tuple([tokens[start + index % period] for index in range(count)])

    def _find(self, size: int) -> int:
        """Where the token after the latest earlier occurrence of the last ``size`` tokens stands, or -1."""
        if size >= self._length:
            return -1
        known, end = self._known, (self._length - 1) * _WIDTH
        pattern = bytes(known[-size * _WIDTH :])
        while (place := known.rfind(pattern, 0, end)) >= 0:
            if place % _WIDTH == 0:
                return place // _WIDTH + size
            end = place + len(pattern) - 1  # bytes of two neighbours that only look like the tokens
        return -1
