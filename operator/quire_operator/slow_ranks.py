"""Which rank of a group that serves computes longer than the others, from several polls of its leader.

One late step names none, and no rank is named by turns: it is named where the median of its steps is far
above that of the others, and until it is near it again. Polls in which no step was made say nothing new.
Pure; keeps what was reported, since only the result is worth a reconcile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from quire_operator.reports import RankReport

POLLS = 5  # whose median counts
SLOW = 1.5  # times as long as the others: named
RECOVERED = 1.25  # no longer named


class SlowRank:
    """Of one group, in one life of its leader."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self._polls: deque[dict[int, int]] = deque(maxlen=POLLS)
        self._last_step = -1

    def take(self, ranks: Sequence[RankReport]) -> None:
        """What the leader reports of all ranks."""
        times = {one.rank: one.step_micros for one in ranks}
        newest = max((one.last_step for one in ranks), default=-1)
        if self._polls and self._polls[-1].keys() != times.keys():
            self._polls.clear()
            self.rank = None
        if newest == self._last_step or len(times) < 2 or not all(times.values()):
            return
        self._last_step = newest
        self._polls.append(times)
        if len(self._polls) == POLLS:
            self._decide()

    def _decide(self) -> None:
        medians = {rank: statistics.median(poll[rank] for poll in self._polls) for rank in self._polls[-1]}

        def times_the_others(rank: int) -> float:
            return medians[rank] / statistics.median(medians[one] for one in medians if one != rank)

        if self.rank is not None and times_the_others(self.rank) >= RECOVERED:
            return
        slowest = max(medians, key=lambda rank: (medians[rank], -rank))
        self.rank = slowest if times_the_others(slowest) > SLOW else None
