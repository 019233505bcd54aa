"""The slots of one lower tier: which content lies where, the least recently used first.

Called by ``tiers`` only, once for the host and once for the disk. A slot is *free*, *filed* (under a digest,
evictable), or *owned* (by a swapped request or a transfer under way). Knows no blocks and no step.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from quire_server.core.prefix_chain import Content


class Filed(NamedTuple):
    """A content in its slot."""

    slot: int
    content: Content
    number: int


class Slots:
    """All O(1), but for skipping the few entries that this step has locked."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._filed: OrderedDict[bytes, Filed] = OrderedDict()
        self._keys: dict[int, bytes] = {}  # slot -> digest
        self._locked: set[int] = set()
        self._owned: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return self.num_slots - len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that ``take`` could hand out now."""
        return len(self._free) + len(self._filed) - len(self._locked)

    def get(self, key: bytes) -> Filed | None:
        """What is filed under a digest."""
        return self._filed.get(key)

    def touch(self, key: bytes) -> None:
        """It was used just now."""
        self._filed.move_to_end(key)

    def lock(self, slot: int) -> None:
        """Keep what is filed in a slot until ``unlock``: a copy of this step reads or writes it."""
        if slot in self._keys:
            self._locked.add(slot)

    def unlock(self) -> None:
        """The step is complete."""
        self._locked.clear()

    def take(self) -> tuple[int, bytes, Filed | None] | None:
        """A slot for its new owner, and what was evicted for it; None when none can be had."""
        if self._free:
            slot = self._free.pop()
            self._owned.add(slot)
            return slot, b"", None
        if not self.num_available:
            return None
        key = next(key for key, filed in self._filed.items() if filed.slot not in self._locked)
        filed = self._filed.pop(key)
        del self._keys[filed.slot]
        self._owned.add(filed.slot)
        self.evictions += 1
        return filed.slot, key, filed

    def file(self, key: bytes, filed: Filed) -> None:
        """An owned slot becomes findable; what else was filed under the digest is dropped."""
        self._owned.remove(filed.slot)
        if (other := self._filed.get(key)) is not None:
            self.drop(other.slot)
        self._filed[key], self._keys[filed.slot] = filed, key

    def drop(self, slot: int) -> bytes | None:
        """Forget what is filed in a slot, if anything is; returns the digest."""
        if (key := self._keys.pop(slot, None)) is not None:
            del self._filed[key]
            self._locked.discard(slot)
            self._free.append(slot)
        return key

    def drop_key(self, key: bytes) -> None:
        """Forget what is filed under a digest, if anything is."""
        if (filed := self._filed.get(key)) is not None:
            self.drop(filed.slot)

    def give_back(self, slots: Iterable[int]) -> None:
        """Owned slots are free again."""
        for slot in slots:
            self._owned.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        """Forget everything that is filed."""
        for slot in list(self._keys):
            self.drop(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Free + filed + owned == all slots, each once."""
        assert self._owned == set(owned), "owned slots"
        assert sorted([*self._free, *self._keys, *self._owned]) == list(range(self.num_slots)), "slots"
        assert {f.slot: key for key, f in self._filed.items()} == self._keys, "filed slots"
        assert not self._locked, "locks outlive their step"
