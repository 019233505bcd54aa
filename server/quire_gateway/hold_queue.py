"""The requests that wait for a replica of one model: first come first served, one client after the other.

Pure; what releases them decides when there is room.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class HeldRequest:
    """One request. ``release``: called once when it may go on. ``can_go``: whether one of these replicas can
    answer it.
    """

    client: str
    release: Callable[[], None]
    can_go: Callable[[Collection[str]], bool] = bool


class HoldQueue:
    """That of one model."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[HeldRequest]] = OrderedDict()  # whose turn it is first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, held: HeldRequest) -> None:
        """It waits behind those of its client."""
        self._by_client.setdefault(held.client, deque()).append(held)
        self._length += 1

    def discard(self, held: HeldRequest) -> None:
        """It waits no longer, because it was released, its client is gone, or its time is over."""
        mine = self._by_client.get(held.client)
        if mine is None or held not in mine:
            return
        mine.remove(held)
        self._length -= 1
        if not mine:
            del self._by_client[held.client]

    def release(self, room: int, replicas: Collection[str]) -> int:
        """Release as many as there is room for, of those that one of the replicas can answer; how many."""
        released = 0
        waiting = len(self._by_client)  # clients in a row that had none to release
        while released < room and waiting:
            client, mine = next(iter(self._by_client.items()))
            found = next((one for one in mine if one.can_go(replicas)), None)
            self._by_client.move_to_end(client)
            if found is None:
                waiting -= 1
                continue
            self.discard(found)
            found.release()
            released += 1
            waiting = len(self._by_client)
        return released
