"""The waiting sequences in their order. Aborted ones stay in the heap and are skipped when met, so that all
is O(log n).

Called by the scheduler only.
"""

import heapq

from quire_server.core.sequence import Sequence, Status


class WaitingQueue:
    """Smallest ``order`` first: earlier virtual arrival (see ``policy``), preempted or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose status is WAITING."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def first(self) -> Sequence | None:
        """The next one, which stays."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what ``first`` returned."""
        heapq.heappop(self._heap)
