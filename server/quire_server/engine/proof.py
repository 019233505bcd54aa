"""Whether the engine is known to compute rightly: what proves it, when the canary has to prove it, and what
its outcomes mean.

An answered request is a proof. A step is none: it may sample nothing but NaN. The canary is due when nothing
has been proved for an interval, and at once after a run of requests that failed for one and the same reason
of the engine. It is the judge, rather than the failures themselves, because a client can ask again and again
for what this model cannot compute. Pure: knows neither clock nor scheduler nor heartbeat.
"""

from __future__ import annotations

import enum

from quire_server.core.step import ENGINE_FAILURES

#: So many answers that fail in a row for the same reason make the canary due at once.
RUN_OF_FAILURES = 3
#: So many wrong canaries in a row end the server, so that it loads its weights again.
MAX_WRONG = 3
# While failures go on though the canary is right, it costs others at most a few steps in so many seconds.
_BETWEEN_RUNS_SECONDS = 2.0


class Outcome(enum.Enum):
    """Of one canary. Inconclusive: it did not complete, for example for lack of memory."""

    RIGHT = enum.auto()
    WRONG = enum.auto()
    INCONCLUSIVE = enum.auto()


class ProofOfInference:
    """`interval`: seconds without a proof after which the canary is due; `stall`: stallTimeoutSeconds. A
    canary that was not right is repeated after a quarter of that, so the third wrong one in a row comes after
    half of it.
    """

    def __init__(self, interval: float, stall: float, now: float) -> None:
        self._interval = interval
        self._retry = min(interval, stall / 4)
        self._checked_at = now
        self._last_outcome = Outcome.RIGHT
        self._failure = ""
        self._num_failures = 0  # in a row, for the reason `_failure`
        self.at = now  # of the last proof
        self.num_wrong = 0  # canaries in a row

    def answered(self, now: float) -> None:
        """A request was answered. That proves nothing while the canary is wrong."""
        self._num_failures = 0
        if self._last_outcome is not Outcome.WRONG:
            self.at = now

    def failed(self, error: str) -> None:
        """A request failed. Only reasons of the engine count, not those of the request itself."""
        if error in ENGINE_FAILURES:
            self._num_failures = self._num_failures + 1 if error == self._failure else 1
            self._failure = error

    @property
    def is_in_doubt(self) -> bool:
        """Whether a run of requests has failed since the last answer or canary."""
        return self._num_failures >= RUN_OF_FAILURES

    def is_due(self, now: float) -> bool:
        """Whether to run the canary."""
        waited = now - self._checked_at
        if self._last_outcome is not Outcome.RIGHT:
            return waited >= self._retry
        if self.is_in_doubt:
            return waited >= _BETWEEN_RUNS_SECONDS
        return now - self.at >= self._interval

    def checked(self, outcome: Outcome, now: float) -> None:
        """The canary has run."""
        self._checked_at, self._last_outcome, self._num_failures = now, outcome, 0
        if outcome is Outcome.RIGHT:
            self.at, self.num_wrong = now, 0
        elif outcome is Outcome.WRONG:
            self.num_wrong += 1
