"""The load of one LLMDeployment: the sum over its ready pods, or why there is none.

A sum without all ready pods, or of stale samples, is no value. In particular it is never 0, which an
autoscaler would take for idle. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

STALE_SECONDS = 15.0


@dataclass(frozen=True)
class LoadSample:
    """The values of one pod at `at` (monotonic seconds), by metric."""

    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Load:
    """The sum over all ready pods, and the age in seconds of its oldest sample."""

    value: float
    age: float


@dataclass(frozen=True)
class Unknown:
    """There is no value. `is_absent`: because there is nothing to measure."""

    message: str
    is_absent: bool = False


def total(
    metric: str, pods: Collection[str], samples: Mapping[str, LoadSample], now: float
) -> Load | Unknown:
    """The sum of `metric` over `pods` (the uids of all that are ready)."""
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
    """A Kubernetes quantity in thousandths, rounded up, so that a value above zero never becomes zero."""
    thousandths = math.ceil(round(value * 1000, 6))
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)
