"""Who goes first. A policy is one pure function: a request's *virtual arrival*, in seconds; earlier goes
first.

Called by ``arrivals`` when a request comes, and again when it loses its place. The key of what waits or runs
never changes, so nothing is ever sorted again, and aging comes for free: a head start of a minute is made up
for by waiting a minute. Two promises follow without a line of code:

- a request is overtaken only by those that arrive less than ``max_head_start`` seconds after it;
- preemption cannot go in circles: it takes from the later one for the sake of the earlier one, in one total
  order in which nobody ever moves ahead.

Virtual times are fair queueing's idea (Demers, Keshav, Shenker, SIGCOMM 1989). Knows neither clock nor queue.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from quire_server.core.request import Request


class Policy(StrEnum):
    """Values of ``--scheduling-policy``."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    SJF = "sjf"


#: Seconds of head start that one level of priority is worth.
SECONDS_PER_LEVEL = 10.0
#: Levels, as vLLM counts them: lower goes first, 0 is normal.
MIN_PRIORITY, MAX_PRIORITY = -100, 100
CLASSES: Mapping[str, int] = {"high": -10, "normal": 0, "low": 10}
#: Before everyone else under every policy. Not for clients: for health checks.
TOP_PRIORITY = -(1 << 31)

#: Seconds that a request stands back for each token of its expected answer, up to a limit.
_SECONDS_PER_TOKEN = 0.1
_MAX_STANDING_BACK = 120.0


def virtual_arrival(policy: Policy, request: Request, expected_tokens: float) -> float:
    """The request's place in time, in seconds of the clock of ``request.arrival``."""
    if request.priority == TOP_PRIORITY:
        return float("-inf")
    return request.arrival + _KEYS[policy](request, expected_tokens)


def max_head_start(policy: Policy) -> float:
    """Seconds: whoever arrives later than this after a request never overtakes it."""
    return _SPREAD[policy]


_KEYS: Mapping[Policy, Callable[[Request, float], float]] = {
    Policy.FCFS: lambda request, expected: 0.0,
    Policy.PRIORITY: lambda request, expected: request.priority * SECONDS_PER_LEVEL,
    Policy.SJF: lambda request, expected: min(expected * _SECONDS_PER_TOKEN, _MAX_STANDING_BACK),
}
_SPREAD: Mapping[Policy, float] = {
    Policy.FCFS: 0.0,
    Policy.PRIORITY: (MAX_PRIORITY - MIN_PRIORITY) * SECONDS_PER_LEVEL,
    Policy.SJF: _MAX_STANDING_BACK,
}
