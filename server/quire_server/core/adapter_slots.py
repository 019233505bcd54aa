"""Which LoRA adapters are on the device: a fixed number of slots, given to those that requests use.

A slot belongs to an adapter as long as one of its requests runs; after that it keeps it until another adapter
needs the slot, the longest unused one first. The scheduler asks; the runner copies what ``take_loads`` names.
Adapters are numbers from 1 on, a new one for each content; 0 is the model itself. Knows neither names nor
tensors.
"""

from collections import Counter, OrderedDict

NO_SLOT = -1


class AdapterSlots:
    """Every method but ``check`` is O(1), or O(slots)."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))  # the lowest is next
        self._slots: OrderedDict[int, int] = OrderedDict()  # by adapter, the longest unused one first
        self._running: Counter[int] = Counter()  # requests with a row, by adapter
        self._users: Counter[int] = Counter()  # requests with or without one
        self._loads: list[tuple[int, int]] = []
        self.num_slots, self.num_loads = num_slots, 0

    @property
    def num_resident(self) -> int:
        """Adapters in a slot."""
        return len(self._slots)

    @property
    def in_use(self) -> tuple[list[int], list[int]]:
        """Adapters with requests that have a row, and those with requests that have none."""
        users, running = self._users, self._running
        return list(running), [adapter for adapter, count in users.items() if count > running[adapter]]

    def is_used(self, adapter: int) -> bool:
        """Whether any request, running or waiting, has this adapter."""
        return self._users[adapter] > 0

    def add_user(self, adapter: int) -> None:
        """A request with this adapter has come."""
        if adapter:
            self._users[adapter] += 1

    def remove_user(self, adapter: int) -> None:
        """It has ended."""
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def has_room(self, adapter: int) -> bool:
        """Whether ``acquire`` would find a slot."""
        is_there = not adapter or adapter in self._slots or bool(self._free)
        return is_there or any(not self._running[other] for other in self._slots)

    def is_running(self, adapter: int) -> bool:
        """Whether a request with this adapter has a row."""
        return self._running[adapter] > 0

    def is_next_to_give(self, adapter: int) -> bool:
        """Whether this adapter runs and has the fewest requests with a row: its slot may be free first. Where
        it gets no more requests, the fewest never become more, so some slot does become free.
        """
        return self._running[adapter] > 0 and adapter == min(self._slots, key=self._running.__getitem__)

    def acquire(self, adapter: int) -> int:
        """The slot of a request that starts; ``has_room`` said that there is one."""
        if not adapter:
            return NO_SLOT
        self._running[adapter] += 1
        if adapter not in self._slots:
            self._slots[adapter] = slot = self._take()
            self._loads.append((slot, adapter))
            self.num_loads += 1
        self._slots.move_to_end(adapter)
        return self._slots[adapter]

    def release(self, adapter: int) -> bool:
        """A request has lost its row; returns whether its slot can be given to another adapter now."""
        if not adapter:
            return False
        self._running[adapter] -= 1
        if self._running[adapter]:
            return False
        del self._running[adapter]
        return True

    def forget(self, adapter: int) -> None:
        """The adapter is gone; no request has it."""
        if (slot := self._slots.pop(adapter, None)) is not None:
            self._free.append(slot)

    def take_loads(self) -> tuple[tuple[int, int], ...]:
        """(slot, adapter) that the next step needs, in order; each is returned once."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        oldest = next(adapter for adapter in self._slots if not self._running[adapter])
        return self._slots.pop(oldest)
