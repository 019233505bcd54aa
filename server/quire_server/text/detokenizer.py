"""Incremental detokenization of one answer: tokens -> text deltas, cut at the first stop string.

Only text that is not final is held back: an unfinished character, and a tail that may be the beginning of a
stop string. The stop string that is *completed* first ends the text (of two at the same token, the one that
begins first), so the result does not depend on how tokens are grouped. A stop string that is completed within
the first ``min_tokens`` tokens does not count.
"""

from collections.abc import Collection, Sequence

from quire_server.text.tokenizer import TextDecoder, Tokenizer


class IncrementalDetokenizer:
    """``stopped`` is the stop string that ended the text; after it all deltas are empty."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens, shown=shown)
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._num_exempt = (
            min_tokens if self._stop else 0
        )  # number of next tokens that cannot complete a stop string
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is final with these tokens."""
        if not self._stop:
            return self._decoder.push(token_ids)
        if self.stopped is not None:
            return ""
        exempt, token_ids = token_ids[: self._num_exempt], token_ids[self._num_exempt :]
        text = ""
        if exempt:
            self._num_exempt -= len(exempt)
            text = self._hold(self._held + self._decoder.push(exempt))
        return text + self._release(self._decoder.push(token_ids))

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.finish())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        if (end := self._first_stop(text, len(self._held))) is not None:
            self._held = ""
            return text[:end]
        return self._hold(text)

    def _hold(self, text: str) -> str:
        """Hold back the tail that may be the beginning of a stop string; returns the rest."""
        held = max(_overlap(text, string) for string in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _first_stop(self, text: str, old: int) -> int | None:
        """Where a stop string ends the text, if one is completed after the first ``old`` characters."""
        begins = [(text.find(string, max(0, old - len(string) + 1)), string) for string in self._stop]
        found = [(begin + len(string), begin, string) for begin, string in begins if begin >= 0]
        if not found:
            return None
        end, begin, self.stopped = min(found)
        return end if self._include_stop else begin


def _overlap(text: str, string: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
