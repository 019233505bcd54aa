"""Drafts without a model: the tokens that followed the last time the newest tokens occurred in the same
order, in the prompt or in the answer itself.

Prompt lookup decoding (Saxena 2023). The search is ``bytes.rfind``, some microseconds at thousands of tokens.
"""

from array import array
from collections.abc import Sequence

_WIDTH = array("i").itemsize


class NgramProposer:
    """The tokens of one request as bytes, which are only ever appended to."""

    __slots__ = ("_length", "_longest", "_shortest", "_tokens")

    def __init__(self, shortest: int, longest: int) -> None:
        """Look for the last ``longest`` tokens first, and for as few as ``shortest``."""
        self._shortest, self._longest = shortest, longest
        self._tokens = bytearray()
        self._length = 0

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """``count`` tokens that may come next, or none. The longest match wins, among equals the latest one;
        a match that reaches to the end is a cycle and is continued.
        """
        length = len(tokens)
        self._tokens += array("i", tokens[self._length :]).tobytes()
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
        """Index of the token after the latest earlier occurrence of the last ``size`` tokens, or -1."""
        if size >= self._length:
            return -1
        known, end = self._tokens, (self._length - 1) * _WIDTH
        pattern = bytes(known[-size * _WIDTH :])
        while (place := known.rfind(pattern, 0, end)) >= 0:
            if place % _WIDTH == 0:
                return place // _WIDTH + size
            end = (
                place + len(pattern) - 1
            )  # not aligned: bytes of two neighbouring tokens look like the pattern
        return -1
