"""Which blocks of prompts should be in the cache of which replica: those that were sent there lately.

For each pod the blocks in the order of their use, bounded, and for each block a bit for each pod that has it:
what the walk along a prompt costs does not depend on how many pods there are. Nothing is asked of the pods.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

#: Blocks of 1 KB, some 4 million tokens: about what a large GPU's cache holds of a small model.
MAX_BLOCKS = 1 << 14
#: Blocks of all pods together, which is 50 MB.
MAX_TOTAL_BLOCKS = 1 << 18


class Match(NamedTuple):
    """How far a prompt is known. ``masks``: for each leading block the pods that have it and all before."""

    masks: Sequence[int]

    def depth(self, bit: int) -> int:
        """So many leading blocks are known on a pod."""
        return bisect_left(self.masks, True, key=lambda mask: not mask & bit)

    def common(self, number: int) -> int:
        """So many leading blocks are known on as many pods at least."""
        return bisect_left(self.masks, True, key=lambda mask: mask.bit_count() < number)


class PrefixIndex:
    """The index of one model."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_total: int = MAX_TOTAL_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._max_total = max_total
        self._bits: dict[str, int] = {}
        self._masks: dict[int, int] = {}
        self._recent: dict[str, dict[int, None]] = {}  # by pod, the least recently used block first

    def keep(self, uids: Collection[str]) -> None:
        """These are all pods: blocks of others are dropped."""
        for gone in self._bits.keys() - set(uids):
            self.drop(gone, tuple(self._recent[gone]))
            del self._recent[gone], self._bits[gone]
        for new in sorted(set(uids) - self._bits.keys()):
            used = sum(self._bits.values())
            self._bits[new] = ~used & (used + 1)  # the lowest bit that is free
            self._recent[new] = {}
        for uid in self._bits:
            self._shrink(uid)

    @property
    def num_pods(self) -> int:
        """How many there are."""
        return len(self._bits)

    def bit(self, uid: str) -> int:
        """The bit of a pod, 0 where it is none of this model."""
        return self._bits.get(uid, 0)

    def owners(self, mask: int) -> Iterator[str]:
        """The pods of a mask."""
        return (uid for uid, bit in self._bits.items() if mask & bit)

    def match(self, digests: Sequence[int]) -> Match:
        """How far a prompt is known."""
        masks, mask, known = [], -1, self._masks
        for digest in digests:
            mask &= known.get(digest, 0)
            if not mask:
                break
            masks.append(mask)
        return Match(masks)

    def add(self, uid: str, digests: Sequence[int]) -> None:
        """A prompt was sent to a pod. Its first block is the last to be forgotten, because without it the
        others cannot be found.
        """
        bit = self._bits.get(uid)
        if bit is None:
            return
        recent, masks = self._recent[uid], self._masks
        for digest in reversed(digests):
            recent.pop(digest, None)
            recent[digest] = None
            masks[digest] = masks.get(digest, 0) | bit
        self._shrink(uid)

    def drop(self, uid: str, digests: Sequence[int]) -> None:
        """A pod does not have these blocks."""
        bit, recent = self._bits.get(uid, 0), self._recent.get(uid, {})
        for digest in digests:
            recent.pop(digest, None)
            if mask := self._masks.get(digest, 0) & ~bit:
                self._masks[digest] = mask
            else:
                self._masks.pop(digest, None)

    def __len__(self) -> int:
        return sum(map(len, self._recent.values()))

    def _shrink(self, uid: str) -> None:
        recent = self._recent[uid]
        most = min(self._max_blocks, self._max_total // max(1, len(self._bits)))
        if (surplus := len(recent) - most) > 0:
            oldest = iter(recent)
            self.drop(uid, [next(oldest) for _ in range(surplus)])
