"""Who owns which KV block: reference counts, a prefix cache, and one free list that is also the eviction
order.

Called by the scheduler. A block is *used* (references > 0), *cached* (no references, content published,
evictable) or *blank*. Published blocks are found again by a sha256 chain over their prefix; a hit is
believed only when the tokens, the salt and the preceding block agree as well, so that no collision can hand
out another prompt's attention. Knows nothing of requests or tensors.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Content(NamedTuple):
    """What a published block holds: its tokens, after which content, under which salt."""

    parent: int
    tokens: tuple[int, ...]
    salt: str


_ROOT = 0  # parent of every first block; contents are numbered from 1


class PrefixChain:
    """Digests of a sequence's full blocks, each over its prefix: computed once, however often admission is
    tried.
    """

    __slots__ = ("contents", "digests", "salt")

    def __init__(self, salt: str) -> None:
        self.salt = salt
        self.digests: list[bytes] = []
        self.contents: list[int] = []  # numbers of the contents that this sequence matched or published

    def extend(self, tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Have digests for the first ``num_blocks`` blocks of ``tokens``."""
        for index in range(len(self.digests), num_blocks):
            previous = self.digests[-1] if self.digests else hashlib.sha256(self.salt.encode()).digest()
            block = array("q", tokens[index * block_size : (index + 1) * block_size])
            self.digests.append(digest(previous, block))


def digest(previous: bytes, block: "array[int]") -> bytes:
    """One link of the chain."""
    return hashlib.sha256(previous + block.tobytes()).digest()


class BlockManager:
    """Every method is O(blocks it hands over); nothing scans the pool but ``check``."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.num_free = num_blocks  # cached ones included
        self._caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._contents: list[_Content | None] = [None] * num_blocks
        self._numbers = [_ROOT] * num_blocks  # of the content in each block
        self._digests: list[bytes] = [b""] * num_blocks
        self._published: dict[bytes, int] = {}  # digest -> block id
        self._last_number = _ROOT
        # Free list: doubly linked through two int lists, with one extra node as its head and tail.
        self._head = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def lookup(self, tokens: Sequence[int], chain: PrefixChain) -> list[int]:
        """Cached blocks of the longest prefix, short of the last token, which is always computed."""
        if not self._caching:
            return []
        size, hits = self.block_size, list[int]()
        limit = (len(tokens) - 1) // size
        chain.extend(tokens, limit, size)
        parent = _ROOT
        for index in range(limit):
            block_id = self._published.get(chain.digests[index])
            if block_id is None:
                break
            expected = _Content(parent, tuple(tokens[index * size : (index + 1) * size]), chain.salt)
            if self._contents[block_id] != expected:
                break
            parent = self._numbers[block_id]
            hits.append(block_id)
        return hits

    def num_free_after(self, hits: Iterable[int], num_new: int) -> int:
        """Free blocks left if these hits and so many new blocks were taken; negative: it does not fit."""
        return self.num_free - num_new - sum(self._references[block_id] == 0 for block_id in hits)

    def take(self, hits: Sequence[int], num_new: int, chain: PrefixChain) -> list[int]:
        """A block table: the hits, shared, and new blocks. The caller made sure that it fits."""
        assert self.num_free_after(hits, num_new) >= 0
        for block_id in hits:  # before any allocation, which might evict them
            if self._references[block_id] == 0:
                self._unlink(block_id)
            self._references[block_id] += 1
        chain.contents[:] = [self._numbers[block_id] for block_id in hits]
        return [*hits, *(self._allocate() for _ in range(num_new))]

    def grow(self) -> int | None:
        """One more block, or None when none is free."""
        return self._allocate() if self.num_free else None

    def release(self, block_ids: Sequence[int]) -> None:
        """Give a table back. Tails go first, so that they are evicted before the prefixes they build on."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, block_id
            if self._references[block_id] == 0:
                # A blank block is the first to be used again, a published one the last.
                before = self._head if self._contents[block_id] is not None else self._next[self._head]
                self._link(block_id, before)

    def publish(self, tokens: Sequence[int], chain: PrefixChain, index: int, block_id: int) -> None:
        """Offer a computed, full block to later requests; its prefix must have been offered before."""
        if not self._caching or len(chain.contents) != index:
            return
        size = self.block_size
        chain.extend(tokens, index + 1, size)
        parent = chain.contents[-1] if chain.contents else _ROOT
        content = _Content(parent, tuple(tokens[index * size : (index + 1) * size]), chain.salt)
        key = chain.digests[index]
        holder = self._published.get(key)
        if holder is not None and self._contents[holder] == content:  # computed twice at once: keep the first
            chain.contents.append(self._numbers[holder])
            return
        if holder is not None:
            self._forget(holder)
        self._last_number += 1
        self._contents[block_id], self._numbers[block_id] = content, self._last_number
        self._digests[block_id], self._published[key] = key, block_id
        chain.contents.append(self._last_number)

    def unpublish(self, block_ids: Sequence[int]) -> None:
        """Offer these blocks to nobody any more, but for those that other tables use, too."""
        for block_id in block_ids:
            if self._references[block_id] == 1 and self._contents[block_id] is not None:
                self._forget(block_id)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Free + cached + used == total, and every list agrees with every other."""
        counts = Counter(block_id for table in tables for block_id in table)
        assert [counts[b] for b in range(self.num_blocks)] == self._references, "reference counts"
        free, node = [], self._next[self._head]
        while node != self._head:
            free.append(node)
            assert self._previous[self._next[node]] == node, "free list links"
            node = self._next[node]
            assert len(free) <= self.num_blocks, "free list runs in a circle"
        assert len(free) == self.num_free == sum(n == 0 for n in self._references), "free blocks"
        assert all(self._references[b] == 0 for b in free), "a used block is on the free list"
        published = {b: self._digests[b] for b in range(self.num_blocks) if self._contents[b] is not None}
        assert {b: d for d, b in self._published.items()} == published, "published blocks"

    def _allocate(self) -> int:
        block_id = self._next[self._head]
        assert block_id != self._head, "no free block"
        self._unlink(block_id)
        if self._contents[block_id] is not None:
            self._forget(block_id)
            self.evictions += 1
        self._references[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        del self._published[self._digests[block_id]]
        self._contents[block_id] = None

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def _link(self, block_id: int, after: int) -> None:
        before = self._previous[after]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self.num_free += 1
