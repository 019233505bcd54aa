"""Where KV blocks go that the device has no room for: to the host's memory, from there to a local disk, and
back.

Called by ``kv_manager``. Decides only: what it wants copied is collected as plain slot numbers for the Step,
and the runner says afterwards what did not work. A content stays in its slot when it is copied up, so that
evicting it from the device again costs nothing. Published contents are filed under their digests, least
recently used first; a preempted request that is swapped out owns its slots until it comes back.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire_server.core.prefix_chain import Content
from quire_server.core.slots import Filed, Slots
from quire_server.core.step import Copies, CopyOutcome


class TierStats(NamedTuple):
    """One lower tier: slots, slots in use, and counters of blocks since the start."""

    slots: int
    used: int
    stored: int
    loaded: int
    evicted: int


class Tiers:
    """The host and the disk; either may have no slots at all."""

    def __init__(self, num_host_slots: int, num_disk_slots: int) -> None:
        self.corrupt = 0  # blocks that came back with a wrong checksum, or did not come back
        self.disk_failed = False
        self._host = Slots(num_host_slots)
        self._disk = Slots(num_disk_slots)
        self._arriving: dict[bytes, Filed] = {}  # on their way from the disk to these host slots
        self._abandoned: set[int] = set()  # host slots whose content is on its way, but not wanted any more
        self._returned: list[int] = []  # slots of swapped requests; this step still reads them
        self._loading: dict[int, int] = {}  # block -> host slot, of the step under way
        self._spills: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []
        self._fetches: list[tuple[int, int]] = []
        self._counts = [0, 0, 0, 0]  # stored on the host, on the disk; loaded from the host, from the disk

    def stats(self) -> tuple[TierStats, TierStats]:
        """Of the host and of the disk."""
        host, disk, counts = self._host, self._disk, self._counts
        return (
            TierStats(host.num_slots, host.num_used, counts[0], counts[2], host.evictions),
            TierStats(disk.num_slots, disk.num_used, counts[1], counts[3], disk.evictions),
        )

    def demote(self, block_id: int, key: bytes, content: Content, number: int) -> None:
        """A published block is about to be overwritten on the device: keep it on the host."""
        filed = self._host.get(key)
        if filed is not None and filed.content == content:
            self._host.touch(key)
        elif key not in self._arriving and (slot := self._host_slot()) is not None:
            self._host.file(key, Filed(slot, content, number))
            self._host.lock(slot)
            self._saves.append((block_id, slot))

    def on_host(self, key: bytes) -> Filed | None:
        """What the host holds under a digest; it counts as a use."""
        filed = self._host.get(key)
        if filed is not None:
            self._host.touch(key)
        return filed

    def is_arriving(self, key: bytes) -> bool:
        """Whether this digest's content is on its way to the host."""
        return key in self._arriving

    def on_disk(self, key: bytes) -> Filed | None:
        """What the disk holds under a digest."""
        return self._disk.get(key)

    def number_of(self, key: bytes, content: Content) -> int | None:
        """The number under which a lower tier knows this content."""
        for filed in (self._host.get(key), self._arriving.get(key), self._disk.get(key)):
            if filed is not None and filed.content == content:
                return filed.number
        return None

    def fetch(self, keys: Iterable[bytes]) -> bool:
        """Have contents of the disk brought to the host, as many as there is room for; False for none."""
        before = len(self._fetches)
        for key in keys:
            filed = self._disk.get(key)
            slot = self._host_slot() if filed is not None else None
            # Making room on the host may have pushed this very content out of the disk.
            filed = self._disk.get(key)
            if slot is None:
                break
            if filed is None:
                self._host.give_back([slot])
                break
            self._disk.touch(key)
            self._disk.lock(filed.slot)
            self._arriving[key] = Filed(slot, filed.content, filed.number)
            self._fetches.append((filed.slot, slot))
        return len(self._fetches) > before

    def lock(self, slot: int) -> None:
        """This step is going to load from a host slot."""
        self._host.lock(slot)

    def load(self, slot: int, block_id: int) -> None:
        """Copy a host slot to a block of the device."""
        self._loads.append((slot, block_id))

    def swap_out(self, block_ids: Sequence[int]) -> list[int]:
        """Host slots that get the content of these blocks and belong to the caller; none when it is full."""
        if self._host.num_available < len(block_ids):
            return []
        slots = [slot for _ in block_ids if (slot := self._host_slot()) is not None]
        self._saves.extend(zip(block_ids, slots, strict=True))
        return slots

    def give_back(self, slots: Sequence[int], *, after_step: bool) -> None:
        """The caller's slots are no longer needed, or not after the copies of this step."""
        if after_step:
            self._returned.extend(slots)
        else:
            self._host.give_back(slots)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget what is filed under these digests."""
        for key in keys:
            self._host.drop_key(key)
            self._disk.drop_key(key)
            if (filed := self._arriving.pop(key, None)) is not None:
                self._abandoned.add(filed.slot)

    def reset(self) -> None:
        """Forget everything but what belongs to swapped requests."""
        self._abandoned.update(filed.slot for filed in self._arriving.values())
        self._arriving.clear()
        self._host.clear()
        self._disk.clear()

    def copies(self) -> Copies | None:
        """What the step that was just decided has to copy."""
        self._host.unlock()
        self._disk.unlock()
        self._host.give_back(self._returned)
        self._returned.clear()
        if not (self._spills or self._saves or self._loads or self._fetches):
            return None
        lists = (self._spills, self._saves, self._loads, self._fetches)
        copies = Copies(*(tuple(pairs) for pairs in lists))
        for index, pairs in enumerate((self._saves, self._spills, self._loads)):
            self._counts[index] += len(pairs)
        self._loading = {block_id: slot for slot, block_id in self._loads}
        for pairs in lists:
            pairs.clear()
        return copies

    def settle(self, outcome: CopyOutcome) -> None:
        """Take in what the runner says of copies."""
        if outcome.arrived or outcome.missed:
            by_slot = {filed.slot: key for key, filed in self._arriving.items()}
            for slot in (*outcome.arrived, *outcome.missed):
                if slot in self._abandoned:
                    self._abandoned.remove(slot)
                    self._host.give_back([slot])
                    continue
                key = by_slot[slot]
                filed = self._arriving.pop(key)
                if slot in outcome.arrived:
                    self._host.file(key, filed)
                else:
                    self._host.give_back([slot])
                    self._disk.drop_key(key)
        for slot in outcome.lost:
            self._disk.drop(slot)
        self._counts[1] -= len(outcome.lost)
        self._counts[3] += len(outcome.arrived)
        for block_id in outcome.failed:
            if (wrong := self._host.drop(self._loading[block_id])) is not None:
                self._disk.drop_key(wrong)  # or it would be brought back for ever
        self.corrupt += len(outcome.failed) + len(outcome.missed)
        if outcome.disk_failed:
            self.disk_failed = True
            self._disk.clear()

    def check(self, swapped: Iterable[int]) -> None:
        """Raise AssertionError when a slot is lost or used twice."""
        arriving = [filed.slot for filed in self._arriving.values()]
        self._host.check([*swapped, *arriving, *self._abandoned])
        self._disk.check([])

    def _host_slot(self) -> int | None:
        """A host slot for a new owner; what is evicted for it goes to the disk."""
        if (taken := self._host.take()) is None:
            return None
        slot, key, evicted = taken
        if evicted is not None and not self.disk_failed:
            known = self._disk.get(key)
            if known is not None and known.content == evicted.content:
                self._disk.touch(key)
            elif (place := self._disk.take()) is not None:
                self._disk.file(key, Filed(place[0], evicted.content, evicted.number))
                self._disk.lock(place[0])
                self._spills.append((slot, place[0]))
        return slot
