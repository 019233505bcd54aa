"""Scheduling policies, and the estimate of output lengths: for shortest job first, and for the KV cache that
requests are expected to need.

A policy is one pure function: a request's *virtual arrival*, in seconds; earlier goes first. It is computed
when a request arrives, and again when it is preempted. The key of a queued or running sequence never changes,
so queues are never sorted again, and starvation is impossible: a head start of a minute is made up for by
waiting a minute. Two guarantees follow:

- a request is overtaken only by those that arrive less than ``max_head_start`` seconds after it;
- preemption cannot go in circles: it is always for the sake of a sequence that is earlier in one total order,
  in which no sequence ever moves forward.

Virtual times are the idea of fair queueing (Demers, Keshav, Shenker, SIGCOMM 1989).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

from quire_server.core.request import Request


class Policy(StrEnum):
    """Values of ``--scheduling-policy``."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    SJF = "sjf"


#: Seconds of head start for one level of priority.
SECONDS_PER_LEVEL = 10.0
#: Levels, as in vLLM: lower goes first, 0 is normal.
MIN_PRIORITY, NORMAL_PRIORITY, MAX_PRIORITY = -100, 0, 100
CLASSES: Mapping[str, int] = {"high": -10, "normal": NORMAL_PRIORITY, "low": 10}
#: Goes first under every policy. For health checks only; clients cannot set it.
TOP_PRIORITY = -(1 << 31)

#: Shortest job first: seconds of delay for each token of the expected answer, up to a limit.
_SECONDS_PER_TOKEN = 0.1
_MAX_DELAY = 120.0


def virtual_arrival(policy: Policy, request: Request, expected_tokens: float) -> float:
    """The request's place in the order, in seconds of the clock of ``request.arrival``."""
    if request.priority == TOP_PRIORITY:
        return float("-inf")
    return request.arrival + _DELAYS[policy](request, expected_tokens)


def max_head_start(policy: Policy) -> float:
    """Seconds: a request that arrives later than this after another one never overtakes it."""
    return _MAX_HEAD_STARTS[policy]


_DELAYS: Mapping[Policy, Callable[[Request, float], float]] = {
    Policy.FCFS: lambda request, expected: 0.0,
    Policy.PRIORITY: lambda request, expected: request.priority * SECONDS_PER_LEVEL,
    Policy.SJF: lambda request, expected: min(expected * _SECONDS_PER_TOKEN, _MAX_DELAY),
}
_MAX_HEAD_STARTS: Mapping[Policy, float] = {
    Policy.FCFS: 0.0,
    Policy.PRIORITY: (MAX_PRIORITY - MIN_PRIORITY) * SECONDS_PER_LEVEL,
    Policy.SJF: _MAX_DELAY,
}

_NEWEST_WEIGHT = 0.1
#: Tokens of an answer before the first one has ended. Without max_tokens it could fill the context, and a new
#: replica that expected such answers would have room for one or two.
_FIRST_GUESS = 256.0
_LengthClass = tuple[int, int]


class OutputLengthEstimator:
    """Exponentially weighted averages of output lengths, in tokens.

    One average for each class of requests: powers of two of the prompt's length and of max_tokens. That
    separates chat from summaries and one-word answers from essays without a model, in a few hundred numbers
    at most.
    """

    def __init__(self) -> None:
        self._averages: dict[_LengthClass, float] = {}
        self._overall: float | None = None

    def expect(self, num_prompt_tokens: int, max_tokens: int) -> float:
        """Tokens that such a request is expected to generate, at most max_tokens."""
        known = self._averages.get(_length_class(num_prompt_tokens, max_tokens), self._overall)
        return min(_FIRST_GUESS if known is None else known, float(max_tokens))

    def learn(self, num_prompt_tokens: int, max_tokens: int, length: int) -> None:
        """Take in the length of an answer that was not aborted."""
        key = _length_class(num_prompt_tokens, max_tokens)
        self._averages[key] = _updated(self._averages.get(key), length)
        self._overall = _updated(self._overall, length)


def _length_class(num_prompt_tokens: int, max_tokens: int) -> _LengthClass:
    return num_prompt_tokens.bit_length(), max_tokens.bit_length()


def _updated(average: float | None, length: int) -> float:
    return float(length) if average is None else average + _NEWEST_WEIGHT * (length - average)
