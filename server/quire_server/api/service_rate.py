"""How fast the house empties: answers that leave in a second while others wait, measured as of late.

Called by `admission`, to say honestly when it is worth asking again. Time in which nobody waits does not
count: an idle server answers few requests and would seem slow. Pure: the caller brings the clock.
"""

from __future__ import annotations

import math

# Seconds after which what was measured weighs a third.
_MEMORY = 30.0


class ServiceRate:
    """A ratio of two decaying sums: answers, and seconds in which somebody waited."""

    def __init__(self) -> None:
        self._answers = 0.0
        self._seconds = 0.0
        self._waiting_since: float | None = None

    def observe(self, now: float, num_left: int, *, is_waiting: bool) -> None:
        """So many answers have just left; `is_waiting`: somebody waits from now on."""
        if self._waiting_since is not None:
            elapsed = now - self._waiting_since
            decay = math.exp(-elapsed / _MEMORY)
            self._answers = self._answers * decay + num_left
            self._seconds = self._seconds * decay + elapsed
        self._waiting_since = now if is_waiting else None

    def seconds_for(self, num_answers: int) -> float | None:
        """How long so many answers take to leave, None as long as nothing was measured."""
        if self._answers < 1 or self._seconds <= 0:
            return None
        return num_answers * self._seconds / self._answers
