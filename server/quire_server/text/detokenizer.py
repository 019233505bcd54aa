"""One answer's tokens -> deltas of its text, cut at the first stop string. Called by the API process per
choice.

What is held back is what cannot be known yet: an unfinished character, and a tail that may be the beginning
of a stop string; never more. The stop that is *completed* first ends the text (of two at once, the one that
began first), so the result does not depend on how the tokens were grouped.
"""

from collections.abc import Sequence

from quire_server.text.tokenizer import TextDecoder, Tokenizer


class IncrementalDetokenizer:
    """``stopped`` is the stop string that ended the text; after that nothing more comes."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.stopped: str | None = None
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(string for string in stop if string)
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        if self.stopped is not None:
            return ""
        return self._release(self._decoder.push(token_ids))

    def finish(self) -> str:
        """Text that was held back: nothing follows any more that could make a stop string of it."""
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
        if (end := self._first_stop(text)) is not None:
            self._held = ""
            return text[:end]
        held = max(_overlap(text, string) for string in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _first_stop(self, text: str) -> int | None:
        """Where the text ends, if a stop string is in it."""
        found = [(text.find(s) + len(s), text.find(s), s) for s in self._stop if s in text]
        if not found:
            return None
        _, begin, self.stopped = min(found)
        return begin


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of the text that is a proper beginning of the string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
