"""Tokens to text as they come: whole characters only, and nothing of a stop string.

Called by the API process, one per answer. Works on bytes, so that a character split over tokens comes out
once and whole, and each token costs the same however long the text is. Knows no requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire_server.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The pieces, joined, are the decoded text up to the first stop string, whatever the chunks were.

    Held back is only what may still become something else: bytes of an unfinished character, and a tail that
    is a proper prefix of a stop string. Among stop strings the one that is complete first ends the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        shown = (i for i in token_ids if not (self._skip_special and self._tokenizer.is_special(i)))
        return self._release(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown))))

    def finish(self) -> str:
        """Text that was held back."""
        text = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._stop:
            return new
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
