"""What copies of KV blocks came to on all ranks of a model: each rank copies its own heads of a block, and
the scheduler knows whole blocks only.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_server.core.step import CopyOutcome


class CopyOutcomes:
    """One outcome of all ranks for each step.

    A block is whole if every rank has its part. A host slot that is filled from the disk counts as answered
    when every rank has answered: until then the scheduler must not give it to another block, which a late
    read would overwrite.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, int] = {}  # host slot -> ranks that have answered
        self._missed: set[int] = set()  # host slots that some rank could not fill

    def combine(self, outcomes: Iterable[CopyOutcome]) -> CopyOutcome | None:
        """The outcome of a step; None: no copy has ended. ``outcomes``: those of any ranks, in any order."""
        failed, lost, ended, disk_failed = set[int](), set[int](), list[int](), False
        for one in outcomes:
            failed.update(one.failed)
            lost.update(one.lost)
            disk_failed |= one.disk_failed
            self._missed.update(one.missed)
            for slot in (*one.arrived, *one.missed):
                self._answers[slot] = self._answers.get(slot, 0) + 1
                if self._answers[slot] == self._num_ranks:
                    del self._answers[slot]
                    ended.append(slot)
        missed = tuple(slot for slot in ended if slot in self._missed)
        arrived = tuple(slot for slot in ended if slot not in self._missed)
        self._missed.difference_update(missed)
        found = CopyOutcome(tuple(sorted(failed)), arrived, missed, tuple(sorted(lost)), disk_failed)
        return None if found == CopyOutcome() else found
