"""How many retries there may be: one for five requests, lest a failing model be asked twice as often.

Each request adds a fifth of a retry. What was not used is kept up to a bound, from which the requests of one
lost replica are all sent elsewhere. Pure.
"""

from __future__ import annotations

REQUESTS_PER_RETRY = 5
RESERVE = 100  # retries


class RetryBudget:
    """The budget of one model."""

    def __init__(self) -> None:
        self._requests = RESERVE * REQUESTS_PER_RETRY  # that no retry was made for

    def add_request(self) -> None:
        """A request has come."""
        self._requests = min(RESERVE * REQUESTS_PER_RETRY, self._requests + 1)

    def take_retry(self) -> bool:
        """Whether there may be one more retry, which then counts."""
        if self._requests < REQUESTS_PER_RETRY:
            return False
        self._requests -= REQUESTS_PER_RETRY
        return True
