"""KV offload: evicted KV blocks go to the host's memory, from there to a local disk, and back.

Only decisions are made here. The copies are collected as plain slot numbers for the Step; the runner's
``OffloadWorker`` executes them and reports which ones failed. A content that is copied up keeps its slot, so
evicting it from the device again costs nothing. Published contents are stored under their digests with LRU
eviction; a preempted request that is swapped out owns its slots until it continues, and so does a transfer
to or from another server.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire_server.core.block_hash import Content
from quire_server.core.stats import TierStats
from quire_server.core.step import Copies, CopyOutcome


class SlotEntry(NamedTuple):
    """A published content and the slot that holds it."""

    slot: int
    content: Content
    number: int


class SlotPool:
    """The slots of one lower tier. A slot is *free*, *stored* (a published content under its digest,
    evictable), or *owned* (by a swapped request, or by a transfer in progress).

    Every method is O(1), except for skipping the few slots that this step has locked.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()
        self._keys: dict[int, bytes] = {}  # slot -> digest
        self._locked: set[int] = set()
        self._owned: set[int] = set()

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that ``allocate`` could return now."""
        return len(self._free) + len(self._entries) - len(self._locked)

    def get(self, key: bytes) -> SlotEntry | None:
        """The entry of a digest."""
        return self._entries.get(key)

    def touch(self, key: bytes) -> None:
        """Mark an entry as used just now."""
        self._entries.move_to_end(key)

    def lock(self, slot: int) -> None:
        """Keep a stored slot from eviction until ``unlock``: a copy of this step reads or writes it."""
        if slot in self._keys:
            self._locked.add(slot)

    def unlock(self) -> None:
        """The step is planned: its copies run before those of the next step."""
        self._locked.clear()

    def allocate(self) -> tuple[int, bytes, SlotEntry | None] | None:
        """(slot, digest and entry that were evicted for it); None when every slot is owned or locked."""
        if self._free:
            slot = self._free.pop()
            self._owned.add(slot)
            return slot, b"", None
        if not self.num_available:
            return None
        key = next(key for key, entry in self._entries.items() if entry.slot not in self._locked)
        entry = self._entries.pop(key)
        del self._keys[entry.slot]
        self._owned.add(entry.slot)
        self.evictions += 1
        return entry.slot, key, entry

    def store(self, key: bytes, entry: SlotEntry) -> None:
        """Publish an owned slot under a digest; another entry of the digest is dropped."""
        self._owned.remove(entry.slot)
        if (other := self._entries.get(key)) is not None:
            self.drop(other.slot)
        self._entries[key], self._keys[entry.slot] = entry, key

    def drop(self, slot: int) -> bytes | None:
        """Remove the entry of a slot and free the slot; returns its digest, None if nothing was stored."""
        if (key := self._keys.pop(slot, None)) is not None:
            del self._entries[key]
            self._locked.discard(slot)
            self._free.append(slot)
        return key

    def drop_key(self, key: bytes) -> None:
        """Remove the entry of a digest, if there is one."""
        if (entry := self._entries.get(key)) is not None:
            self.drop(entry.slot)

    def release(self, slots: Iterable[int]) -> None:
        """Free owned slots."""
        for slot in slots:
            self._owned.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        """Remove every entry."""
        for slot in list(self._keys):
            self.drop(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless free + stored + owned == all slots, each once."""
        assert self._owned == set(owned), "owned slots"
        assert sorted([*self._free, *self._keys, *self._owned]) == list(range(self.num_slots)), "slots"
        assert {f.slot: key for key, f in self._entries.items()} == self._keys, "stored slots"
        assert not self._locked, "a lock outlives its step"


class OffloadManager:
    """The host tier and the disk tier; either may have no slots."""

    def __init__(self, num_host_slots: int, num_disk_slots: int) -> None:
        self.corrupt = 0  # blocks that were read back with a wrong checksum, or could not be read
        self.disk_failed = False
        self._host = SlotPool(num_host_slots)
        self._disk = SlotPool(num_disk_slots)
        self._arriving: dict[bytes, SlotEntry] = {}  # being read from the disk to these host slots
        self._abandoned: set[int] = set()  # host slots that are being filled, but whose content was dropped
        self._returned: list[int] = []  # slots of swapped requests that this step still reads
        self._loading: dict[int, int] = {}  # block -> host slot, of the step in flight
        self._spills: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._fetches: list[tuple[int, int]] = []
        self._counts = [
            0,
            0,
            0,
            0,
        ]  # stored on the host, stored on the disk, loaded from the host, from the disk

    def stats(self) -> tuple[TierStats, TierStats]:
        """Gauges and counters of the host and of the disk."""
        host, disk, counts = self._host, self._disk, self._counts
        return (
            TierStats(host.num_slots, host.num_used, counts[0], counts[2], host.evictions),
            TierStats(disk.num_slots, disk.num_used, counts[1], counts[3], disk.evictions),
        )

    def demote(self, block_id: int, key: bytes, content: Content, number: int) -> None:
        """Save a published block, which is about to be overwritten on the device, to the host."""
        entry = self._host.get(key)
        if entry is not None and entry.content == content:
            self._host.touch(key)
        elif key not in self._arriving and (slot := self._host_slot()) is not None:
            self._host.store(key, SlotEntry(slot, content, number))
            self._host.lock(slot)
            self._saves.append((block_id, slot))

    def on_host(self, key: bytes) -> SlotEntry | None:
        """The host's entry of a digest, which counts as used."""
        entry = self._host.get(key)
        if entry is not None:
            self._host.touch(key)
        return entry

    def is_arriving(self, key: bytes) -> bool:
        """Whether the content of this digest is being read from the disk."""
        return key in self._arriving

    def on_disk(self, key: bytes) -> SlotEntry | None:
        """The disk's entry of a digest."""
        return self._disk.get(key)

    def number_of(self, key: bytes, content: Content) -> int | None:
        """The number of this content in a lower tier, None where no tier has it."""
        for entry in (self._host.get(key), self._arriving.get(key), self._disk.get(key)):
            if entry is not None and entry.content == content:
                return entry.number
        return None

    def fetch(self, keys: Iterable[bytes]) -> bool:
        """Start reading contents from the disk to the host, as many as there is room for; False for none."""
        before = len(self._fetches)
        for key in keys:
            entry = self._disk.get(key)
            slot = self._host_slot() if entry is not None else None
            # Making room on the host may have evicted this very content from the disk.
            entry = self._disk.get(key)
            if slot is None:
                break
            if entry is None:
                self._host.release([slot])
                break
            self._disk.touch(key)
            self._disk.lock(entry.slot)
            self._arriving[key] = SlotEntry(slot, entry.content, entry.number)
            self._fetches.append((entry.slot, slot))
        return len(self._fetches) > before

    def lock(self, slot: int) -> None:
        """Keep a host slot from eviction: this step loads from it."""
        self._host.lock(slot)

    def load(self, slot: int, block_id: int) -> None:
        """Copy a host slot to a block of the device, before the step's forward pass."""
        self._loads.append((slot, block_id))

    def take(self, count: int) -> list[int]:
        """Host slots, owned by the caller; none when the host has not so many."""
        if self._host.num_available < count:
            return []
        return [slot for _ in range(count) if (slot := self._host_slot()) is not None]

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the device to owned slots, before the step's forward pass."""
        self._saves.extend(zip(block_ids, slots, strict=True))

    def swap_out(self, block_ids: Sequence[int]) -> list[int]:
        """Host slots, owned by the caller, to which these blocks are saved; none when the host is full."""
        slots = self.take(len(block_ids))
        if slots:
            self.save(block_ids, slots)
        return slots

    def release(self, slots: Sequence[int], *, after_step: bool) -> None:
        """Free slots from ``swap_out``, now or after the copies of this step."""
        if after_step:
            self._returned.extend(slots)
        else:
            self._host.release(slots)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove the entries of these digests from every tier."""
        for key in keys:
            self._host.drop_key(key)
            self._disk.drop_key(key)
            if (entry := self._arriving.pop(key, None)) is not None:
                self._abandoned.add(entry.slot)

    def reset(self) -> None:
        """Remove every entry. Slots of swapped requests stay."""
        self._abandoned.update(entry.slot for entry in self._arriving.values())
        self._arriving.clear()
        self._host.clear()
        self._disk.clear()

    @property
    def has_copies(self) -> bool:
        """Whether the next step has any."""
        return bool(self._spills or self._saves or self._loads or self._fetches)

    def take_copies(self) -> Copies | None:
        """The copies of the step that was just planned, collected since the previous one."""
        self._host.unlock()
        self._disk.unlock()
        self._host.release(self._returned)
        self._returned.clear()
        if not self.has_copies:
            return None
        lists = (self._spills, self._saves, self._loads, self._fetches)
        copies = Copies(*(tuple(pairs) for pairs in lists))
        for index, pairs in enumerate((self._saves, self._spills, self._loads)):
            self._counts[index] += len(pairs)
        self._loading = {block_id: slot for slot, block_id in self._loads}
        for pairs in lists:
            pairs.clear()
        return copies

    def apply_outcome(self, outcome: CopyOutcome) -> None:
        """Take in what the runner reports about copies."""
        if outcome.arrived or outcome.missed:
            by_slot = {entry.slot: key for key, entry in self._arriving.items()}
            for slot in (*outcome.arrived, *outcome.missed):
                if slot in self._abandoned:
                    self._abandoned.remove(slot)
                    self._host.release([slot])
                    continue
                key = by_slot[slot]
                entry = self._arriving.pop(key)
                if slot in outcome.arrived:
                    self._host.store(key, entry)
                else:
                    self._host.release([slot])
                    self._disk.drop_key(key)
        for slot in outcome.lost:
            self._disk.drop(slot)
        self._counts[1] -= len(outcome.lost)
        self._counts[3] += len(outcome.arrived)
        for block_id in outcome.failed:
            if (wrong := self._host.drop(self._loading[block_id])) is not None:
                self._disk.drop_key(wrong)  # or it would be read again and again
        self.corrupt += len(outcome.failed) + len(outcome.missed)
        if outcome.disk_failed:
            self.disk_failed = True
            self._disk.clear()

    def check(self, swapped: Iterable[int]) -> None:
        """Raise AssertionError when a slot is lost or used twice."""
        arriving = [entry.slot for entry in self._arriving.values()]
        self._host.check([*swapped, *arriving, *self._abandoned])
        self._disk.check([])

    def _host_slot(self) -> int | None:
        """A host slot for a new owner; the content that is evicted for it goes to the disk."""
        if (taken := self._host.allocate()) is None:
            return None
        slot, key, evicted = taken
        if evicted is not None and not self.disk_failed:
            known = self._disk.get(key)
            if known is not None and known.content == evicted.content:
                self._disk.touch(key)
            elif (place := self._disk.allocate()) is not None:
                self._disk.store(key, SlotEntry(place[0], evicted.content, evicted.number))
                self._disk.lock(place[0])
                self._spills.append((slot, place[0]))
        return slot
