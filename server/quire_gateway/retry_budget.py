"""How many retries there may be: one for five requests, lest a failing model be asked twice as often.

Each request adds its percentage of a retry, and each second one more: long streams are few requests, and go
on at another replica whenever theirs is lost. What was not used is kept up to a bound, from which the
requests of one lost replica are all sent elsewhere. Pure, with the time passed in.
"""

from __future__ import annotations

PERCENT = 20
RESERVE = 100  # retries
A_SECOND = 1
_RETRY = 100  # percent


class RetryBudget:
    """The budget of one model, or of one route. With 0 percent there are none."""

    def __init__(self, percent: int = PERCENT) -> None:
        self._percent = percent
        self._most = RESERVE * _RETRY if percent else 0
        self._saved: float = self._most
        self._at: float | None = None

    def add_request(self) -> None:
        """A request has come."""
        self._saved = min(self._most, self._saved + self._percent)

    def take_retry(self, now: float) -> bool:
        """Whether there may be one more retry at this time, which then counts."""
        seconds = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._saved = min(self._most, self._saved + _RETRY * A_SECOND * seconds)
        if self._saved < _RETRY:
            return False
        self._saved -= _RETRY
        return True
