"""What identifies a full KV block: a sha256 chain over its whole prefix and its salt, and the content behind
the digest.

Called by ``block_manager`` and ``tiers``, which look contents up, and by ``kv_manager``. A digest only finds;
what is found is believed when the tokens, the salt and the preceding content agree as well, so that no
collision can hand out another prompt's attention. Knows no blocks.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

ROOT = 0  # parent of every first block; contents are numbered from 1


class Content(NamedTuple):
    """What a published block holds: its tokens, after which content (by number), under which salt."""

    parent: int
    tokens: tuple[int, ...]
    salt: str


class PrefixChain:
    """Digests of a sequence's full blocks, each over its prefix: computed once, however often admission is
    tried.
    """

    __slots__ = ("digests", "numbers", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.digests: list[bytes] = []
        self.numbers: list[int] = []  # of the contents that this sequence found or published

    def extend(self, tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Have digests for the first ``num_blocks`` blocks of ``tokens``."""
        for index in range(len(self.digests), num_blocks):
            self.link(index, tokens[index * block_size : (index + 1) * block_size])

    def link(self, index: int, block: Sequence[int]) -> bytes:
        """The digest of a block with these tokens, where those of all before it are there."""
        if index == len(self.digests):
            previous = self.digests[-1] if index else hashlib.sha256(self.salt.encode()).digest()
            self.digests.append(digest(previous, block))
        return self.digests[index]

    def content(self, parent: int, tokens: Sequence[int], index: int, block_size: int) -> Content:
        """The content of a sequence's block, given the number of the one before."""
        return Content(parent, tuple(tokens[index * block_size : (index + 1) * block_size]), self.salt)


def digest(previous: bytes, block: Sequence[int]) -> bytes:
    """One link of the chain."""
    return hashlib.sha256(previous + _packed(len(block))(*block)).digest()


@cache
def _packed(count: int) -> Callable[..., bytes]:
    return Struct(f"<{count}I").pack
