"""How many lines of one batch are asked for at once: additive increase, multiplicative decrease.

One more after as many successes as there may be in flight, half of it when the gateway says that there is no
room (429, 503), so that a batch takes what interactive requests leave, and finds out how much that is. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The state of one batch."""

    limit: int = 1
    successes: int = 0  # since the limit has changed
    halved_at: float = float("-inf")
    paused_until: float = float("-inf")  # nothing is asked for before
    pause: float = 0.0  # the last one; 0 after a success

    def room(self, in_flight: int, now: float) -> int:
        """How many more may be asked for now."""
        return 0 if now < self.paused_until else max(self.limit - in_flight, 0)


def after_success(state: Concurrency, most: int) -> Concurrency:
    """An answer has come; ``most``: the highest limit."""
    successes = state.successes + 1
    if successes < state.limit:
        return replace(state, successes=successes, pause=0.0)
    return replace(state, limit=min(state.limit + 1, most), successes=0, pause=0.0)


def after_refusal(state: Concurrency, begun_at: float, now: float, retry_after: float) -> Concurrency:
    """There was no room for a request that began then. Those that were in flight when the limit was halved
    say nothing new.
    """
    if begun_at < state.halved_at:
        return state
    pause = min(max(_FIRST_PAUSE_SECONDS, 2 * state.pause), _LONGEST_PAUSE_SECONDS)
    until = now + min(max(pause, retry_after), _LONGEST_PAUSE_SECONDS)
    return Concurrency(max(state.limit // 2, 1), halved_at=now, paused_until=until, pause=pause)
