"""The pool of KV blocks on the device: reference counts, published contents, pins, and one free list that is
also the LRU eviction order.

A block is *used* (references > 0), *pinned* (no references, kept until a time), *cached* (no references,
content published, evictable) or *blank*. Before a cached block is overwritten it is passed to ``on_evict``,
for the lower tiers. Knows nothing of requests or tensors.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from quire_server.core.block_hash import ROOT, Content

# (block id, digest, content, its number): this block is about to be overwritten.
OnEvict = Callable[[int, bytes, Content, int], None]


class Pin(NamedTuple):
    """Keeps a block from eviction until a time; counted to one client."""

    until: float
    client: str


class BlockPool:
    """Every method is O(blocks it is given or returns), except ``check``, ``reset``, ``release_pins``, and
    where a pinned block leaves the prefix cache.
    """

    def __init__(self, num_blocks: int, *, max_pinned: int, on_evict: OnEvict) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self.num_free = num_blocks  # cached ones included, pinned ones not
        self._max_pinned = max_pinned
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._numbers = [ROOT] * num_blocks  # of the content in each block
        self._digests: list[bytes] = [b""] * num_blocks
        self._published: dict[bytes, int] = {}  # digest -> block id
        self._pinned: dict[int, Pin] = {}  # by block id
        self._num_pinned_by = Counter[str]()  # by client
        # Heap of one entry a pinned block: when to look whether its pin is over, which was renewed perhaps.
        self._expiries: list[tuple[float, int]] = []
        # Free list: doubly linked through two int lists; one extra node is its head and tail.
        self._head = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    def find(self, key: bytes) -> tuple[int, Content, int] | None:
        """(block id, content, its number) of the block that is published under a digest."""
        block_id = self._published.get(key)
        if block_id is None:
            return None
        content = self._contents[block_id]
        assert content is not None
        return block_id, content, self._numbers[block_id]

    def num_free_after(self, hits: Iterable[int], num_new: int) -> int:
        """Free blocks left after taking these hits and so many new blocks; negative: they do not fit."""
        pinned, references = self._pinned, self._references
        return self.num_free - num_new - sum(references[b] == 0 and b not in pinned for b in hits)

    def freed_by(self, table: Iterable[int], released: Counter[int]) -> list[int]:
        """Blocks that releasing a table would free, after the references that ``released`` counts by block
        (to which those of the table are added). Blocks with other references or with a pin are not freed.
        """
        freed = []
        for block_id in table:
            released[block_id] += 1
            if released[block_id] == self._references[block_id] and block_id not in self._pinned:
                freed.append(block_id)
        return freed

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these published blocks."""
        for block_id in block_ids:
            if self._references[block_id] == 0 and block_id not in self._pinned:
                self._unlink(block_id)
            self._references[block_id] += 1

    def allocate(self) -> int | None:
        """A block with one reference: a blank one, or the least recently used cached one. None when none is
        free.
        """
        if not self.num_free:
            return None
        block_id = self._next[self._head]
        self._unlink(block_id)
        if (content := self._contents[block_id]) is not None:
            self._on_evict(block_id, self._digests[block_id], content, self._numbers[block_id])
            self._forget(block_id)
            self.evictions += 1
        self._references[block_id] = 1
        return block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a block table. The last blocks become free first, so that they are evicted before their
        prefix.
        """
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, block_id
            if self._references[block_id] == 0 and block_id not in self._pinned:
                self._set_free(block_id)

    def publish(self, block_id: int, key: bytes, content: Content, number: int) -> None:
        """Enter a computed block into the prefix cache. It replaces a block with the same digest."""
        if (holder := self._published.get(key)) is not None:
            self._forget(holder)
        self._contents[block_id], self._numbers[block_id] = content, number
        self._digests[block_id], self._published[key] = key, block_id

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache, except those that other tables use too."""
        for block_id in block_ids:
            if self._references[block_id] == 1 and self._contents[block_id] is not None:
                self._forget(block_id)

    def pin(self, keys: Iterable[bytes], until: float, client: str = "") -> int:
        """Keep the blocks with these digests from eviction until a time; returns how many were refused,
        because too many blocks are pinned. A pin that is renewed stays with its first client.

        A client may pin no more than it leaves to the others, so none takes all; without a name it is the
        only one.
        """
        refused = 0
        for key in keys:
            if (block_id := self._published.get(key)) is None:
                continue
            known = self._pinned.get(block_id)
            if known is not None:
                self._pinned[block_id] = known._replace(until=max(known.until, until))
            elif self._max_pinned - len(self._pinned) <= (self._num_pinned_by[client] if client else 0):
                refused += 1
            else:
                if self._references[block_id] == 0:
                    self._unlink(block_id)
                self._pinned[block_id] = Pin(until, client)
                self._num_pinned_by[client] += 1
                heapq.heappush(self._expiries, (until, block_id))
        return refused

    @property
    def num_pinned(self) -> int:
        """Pinned blocks, in use or not."""
        return len(self._pinned)

    def expire(self, now: float) -> None:
        """Release the pins whose time is over."""
        while self._expiries and self._expiries[0][0] <= now:
            block_id = self._expiries[0][1]
            if (until := self._pinned[block_id].until) > now:
                heapq.heapreplace(self._expiries, (until, block_id))
            else:
                heapq.heappop(self._expiries)
                self._unpin(block_id)

    def release_pins(self) -> bool:
        """Release all pins, because a running request needs blocks; False when there are none."""
        pinned = sorted(self._pinned, key=self._pinned.__getitem__)
        self._expiries.clear()
        for block_id in pinned:
            self._unpin(block_id)
        return bool(pinned)

    def reset(self) -> None:
        """Clear the prefix cache, pins included. Blocks in use stay with their sequences."""
        self.release_pins()
        for block_id in list(self._published.values()):
            self._forget(block_id)

    def num_unaccounted(self, tables: Iterable[Sequence[int]]) -> int:
        """Leaked blocks: neither free, nor pinned, nor in a table."""
        return self.num_blocks - self.num_free - len(self._pinned.keys() | set(chain.from_iterable(tables)))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless free + cached + pinned + used == total and all lists agree."""
        counts = Counter(block_id for table in tables for block_id in table)
        assert [counts[b] for b in range(self.num_blocks)] == self._references, "reference counts"
        free, node = [], self._next[self._head]
        while node != self._head:
            free.append(node)
            assert self._previous[self._next[node]] == node, "free list links"
            node = self._next[node]
            assert len(free) <= self.num_blocks, "cycle in the free list"
        idle = {b for b in range(self.num_blocks) if self._references[b] == 0}
        assert len(free) == self.num_free and set(free) == idle - self._pinned.keys(), "free blocks"
        published = {b: self._digests[b] for b in range(self.num_blocks) if self._contents[b] is not None}
        assert {b: d for d, b in self._published.items()} == published, "published blocks"
        assert self._pinned.keys() <= published.keys() and len(self._pinned) <= self._max_pinned, "pins"
        assert Counter(pin.client for pin in self._pinned.values()) == self._num_pinned_by, "pins by client"
        assert sorted(block_id for _, block_id in self._expiries) == sorted(self._pinned), "expiries"

    def _forget(self, block_id: int) -> None:
        del self._published[self._digests[block_id]]
        self._contents[block_id] = None
        if block_id in self._pinned:
            # Before its time, which is rare: the entry is removed, or it would stand for a later pin.
            self._expiries = [entry for entry in self._expiries if entry[1] != block_id]
            heapq.heapify(self._expiries)
            self._unpin(block_id)

    def _unpin(self, block_id: int) -> None:
        client = self._pinned.pop(block_id).client
        self._num_pinned_by[client] -= 1
        if not self._num_pinned_by[client]:
            del self._num_pinned_by[client]
        if self._references[block_id] == 0:
            self._set_free(block_id)

    def _set_free(self, block_id: int) -> None:
        # A blank block is allocated first, a published one last.
        after = self._head if self._contents[block_id] is not None else self._next[self._head]
        before = self._previous[after]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
