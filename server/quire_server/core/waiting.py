"""The waiting sequences in their order. Aborted ones stay in the heap and are skipped when met, or swept out
once they are the most of it, so that all is O(log n) in time and O(n) in memory.

Called by the scheduler only.
"""

import heapq

from quire_server.core.sequence import Sequence, Status


class WaitingQueue:
    """Smallest ``order`` first: earlier virtual arrival (see ``policy``), preempted or not."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._num_gone = 0

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence whose status is WAITING."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def first(self) -> Sequence | None:
        """The next one, which stays."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what ``first`` returned."""
        heapq.heappop(self._heap)

    def gone(self) -> None:
        """One of those in here waits no longer: its status has changed."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_gone = 0
