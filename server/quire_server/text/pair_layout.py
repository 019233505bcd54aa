"""Where the special tokens of a pair of texts lie, as the tokenizer's own template puts them.

Both texts are tokenised by themselves, one of them maybe for many pairs, and joined here. Found out once,
from a pair whose tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from quire_server.errors import ConfigError

_PROBE = "a"


@dataclass(frozen=True)
class PairLayout:
    """Special tokens before, between and after two texts. ``num_of_first``: how many of those between them
    have the token type of the first text; None: there is one type.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    num_of_first: int | None

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> PairLayout:
        """Of a tokenizer. Raises ConfigError where its pairs are no two texts side by side."""
        probe = library.encode(_PROBE, _PROBE)
        parts, ids, types = list(probe.sequence_ids), probe.ids, probe.type_ids
        if 0 not in parts or 1 not in parts or parts.index(1) < parts.index(0):
            raise ConfigError("The tokenizer makes no pairs of texts, which a cross-encoder needs.")
        last_of_first = max(place for place, part in enumerate(parts) if part == 0)
        begin, last = parts.index(1), max(place for place, part in enumerate(parts) if part == 1)
        between = slice(last_of_first + 1, begin)
        return cls(
            tuple(ids[: parts.index(0)]),
            tuple(ids[between]),
            tuple(ids[last + 1 :]),
            types[between].count(0) if types[begin] else None,
        )

    @property
    def num_special(self) -> int:
        """Special tokens of a pair."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """(token ids of the pair, the first one of the second text's type; 0 where there is one type)."""
        at = 0
        if self.num_of_first is not None:
            at = len(self.before) + len(first) + self.num_of_first
        return (*self.before, *first, *self.between, *second, *self.after), at
