"""The identity of a full KV block: a sha256 chain over its whole prefix and its salt, and the content itself.

A digest is only used to find a block. The prefix cache compares tokens, salt and preceding content as well
before it uses the block, so that no hash collision can give a request the attention of another prompt.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

ROOT = 0  # parent of every first block; contents are numbered from 1


class Content(NamedTuple):
    """What a published block holds: its tokens, the number of the preceding content, and the cache salt."""

    parent: int
    tokens: tuple[int, ...]
    salt: str


def adapted_salt(salt: str, adapter: str) -> str:
    """The salt of blocks that an adapter with this key (of its name and its content) computes: no others have
    it. No client's salt begins with this character: its scope comes first, or a NUL.
    """
    return f"\1{adapter}\0{salt}" if adapter else salt


class BlockHashChain:
    """Digests of a sequence's full blocks, each over its prefix. Computed once, however often admission is
    tried.
    """

    __slots__ = ("digests", "numbers", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.digests: list[bytes] = []
        self.numbers: list[int] = []  # of the contents that this sequence found or published

    def extend(self, tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Compute the digests of the first ``num_blocks`` blocks of ``tokens``."""
        for index in range(len(self.digests), num_blocks):
            self.digest_of(index, tokens[index * block_size : (index + 1) * block_size])

    def digest_of(self, index: int, block: Sequence[int]) -> bytes:
        """The digest of the block with these tokens; those of all blocks before it must be known."""
        if index == len(self.digests):
            previous = self.digests[-1] if index else hashlib.sha256(self.salt.encode()).digest()
            self.digests.append(digest(previous, block))
        return self.digests[index]

    def content(self, parent: int, tokens: Sequence[int], index: int, block_size: int) -> Content:
        """The content of a sequence's block, given the number of the preceding content."""
        return Content(parent, tuple(tokens[index * block_size : (index + 1) * block_size]), self.salt)


def digest(previous: bytes, block: Sequence[int]) -> bytes:
    """The digest of a block after the one with the digest ``previous``."""
    return hashlib.sha256(previous + _packer(len(block))(*block)).digest()


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"<{count}I").pack
