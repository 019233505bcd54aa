"""How many retries there may be: one for five requests, lest a failing model be asked twice as often.

Each request adds its percentage of a retry. What was not used is kept up to a bound, from which the requests
of one lost replica are all sent elsewhere. Pure.
"""

from __future__ import annotations

PERCENT = 20
RESERVE = 100  # retries
_RETRY = 100  # percent


class RetryBudget:
    """The budget of one model, or of one route."""

    def __init__(self, percent: int = PERCENT) -> None:
        self._percent = percent
        self._most = RESERVE * _RETRY if percent else 0
        self._saved = self._most

    def add_request(self) -> None:
        """A request has come."""
        self._saved = min(self._most, self._saved + self._percent)

    def take_retry(self) -> bool:
        """Whether there may be one more retry, which then counts."""
        if self._saved < _RETRY:
            return False
        self._saved -= _RETRY
        return True
