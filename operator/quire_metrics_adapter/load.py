"""The load of one LLMDeployment: the sum of its ready pods' samples, or why there is none.

The one rule: a sum that is not of all ready pods, or is of old samples, is no value. Above all it is never 0,
which an autoscaler would take for idle. Pure; called by the server for each request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

STALE_SECONDS = 15.0


@dataclass(frozen=True)
class Sample:
    """What one pod said at `at` (monotonic seconds): metric name -> value."""

    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Load:
    """The sum over all ready pods, and the age in seconds of its oldest part."""

    value: float
    age: float


@dataclass(frozen=True)
class Unknown:
    """There is no value. `is_absent`: because there is nothing that could have one."""

    message: str
    is_absent: bool = False


def total(metric: str, pods: Collection[str], samples: Mapping[str, Sample], now: float) -> Load | Unknown:
    """The sum of `metric` over `pods` (uids of all that are ready)."""
    if not pods:
        return Unknown("no pod of it is ready", is_absent=True)
    answers = [samples[uid] for uid in pods if uid in samples]
    fresh = [sample for sample in answers if now - sample.at <= STALE_SECONDS]
    values = [sample.values[metric] for sample in fresh if metric in sample.values]
    if len(values) == len(pods):
        return Load(sum(values), now - min(sample.at for sample in fresh))
    if len(fresh) == len(pods):
        silent = len(pods) - len(values)
        return Unknown(
            f"{silent} of {len(pods)} ready pods have no believable {metric}", is_absent=not values
        )
    missing = len(pods) - len(fresh)
    return Unknown(
        f"{missing} of {len(pods)} ready pods did not answer within {STALE_SECONDS:.0f} s at /metrics"
    )


def quantity(value: float) -> str:
    """As a Kubernetes quantity in thousandths, rounded up: what is not zero does not become zero."""
    thousandths = math.ceil(round(value * 1000, 6))
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)
