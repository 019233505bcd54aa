"""How fast the house empties: answers that leave in a second while others wait, measured as of late.

Called by `admission`, to say honestly when it is worth asking again. Time in which nobody waits does not
count: an idle server answers few requests and would seem slow. Time in which somebody waits counts, answers
or not, so that a server that stands still seems slow. Pure: the caller brings the clock.
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
        self._has_measured = False  # by now the answers may have decayed to almost none

    def observe(self, now: float, num_left: int, *, is_waiting: bool) -> None:
        """So many answers have just left; `is_waiting`: somebody waits from now on."""
        self._answers, self._seconds = self._until(now)
        if self._waiting_since is not None:
            self._answers += num_left
            self._has_measured = self._has_measured or num_left > 0
        self._waiting_since = now if is_waiting else None

    def seconds_for(self, now: float, num_answers: int, guess: float) -> float:
        """How long so many answers take to leave.

        Before the first one left it is `guess`, or the time that it was waited for, if that is longer.
        """
        answers, seconds = self._until(now)
        if not self._has_measured:
            return max(guess, seconds)
        return num_answers * seconds / answers if answers > 0 else math.inf

    def _until(self, now: float) -> tuple[float, float]:
        """Both sums as of now."""
        if self._waiting_since is None:
            return self._answers, self._seconds
        waited = now - self._waiting_since
        decay = math.exp(-waited / _MEMORY)
        return self._answers * decay, self._seconds * decay + waited
