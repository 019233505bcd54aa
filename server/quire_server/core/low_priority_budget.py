"""How many tokens of a step go to prompts that a new request of normal priority would overtake.

A request waits for the end of the step that has begun. So while requests of normal priority come, prompts
below it get few tokens of a step; without it an interactive request behind a batch waited for 512 of them.
Knows priorities and arrivals, not blocks or rows.
"""

from quire_server.core.policy import NORMAL_PRIORITY, TOP_PRIORITY
from quire_server.core.request import Request
from quire_server.core.sequence import Sequence

__all__ = ["LowPriorityBudget"]

_BOUNDED_SECONDS = 30.0  # after a request of normal priority came


class LowPriorityBudget:
    """``tokens``: of a step; None where nothing is bounded."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._newest_arrival = float("-inf")  # of requests of normal or higher priority
        self._left: int | None = None  # of the step; None: no bound
        self._now = 0.0

    def add(self, request: Request) -> None:
        """A request came. Health checks do not count: they can wait."""
        if TOP_PRIORITY < request.priority <= NORMAL_PRIORITY:
            self._newest_arrival = max(self._newest_arrival, request.arrival)

    def begin_step(self, now: float) -> None:
        """The step is filled that begins at this time."""
        self._left = self._tokens if now < self._newest_arrival + _BOUNDED_SECONDS else None
        self._now = now

    def is_spent_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has to wait for a later step."""
        return self._left == 0 and self._is_low(sequence)

    def take(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of these tokens of its prompt the step computes. Nothing is left for prompts of low
        priority beside another one.
        """
        if self._left is None:
            return num_tokens
        if not self._is_low(sequence):
            self._left = 0
            return num_tokens
        taken = min(num_tokens, self._left)
        self._left -= taken
        return taken

    def _is_low(self, sequence: Sequence) -> bool:
        """Whether a request of normal priority that comes now goes before it: by its virtual arrival."""
        return sequence.order[0] > self._now
