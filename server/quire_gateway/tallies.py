"""Counts by labels, in plain dicts, that a scrape reads.

prometheus_client's own metrics look a series up, convert its labels and take two locks for each increment. A
gateway counts a dozen things for each request, on one thread. Knows neither the gateway's labels nor HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Series(Protocol):
    """A metric with one series for each combination of labels that was seen."""

    #: The names of the labels.
    names: Labels

    def __iter__(self) -> Iterator[Labels]:
        """The labels of each series."""

    def remove(self, labels: Labels) -> None:
        """Forget one series."""


class Tally(Collector):
    """A counter, or a gauge that goes up and down. One without labels is there from the start, with 0."""

    def __init__(
        self,
        name: str,
        text: str,
        names: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> None:
        self.names = tuple(names)
        self._head = name, text
        self._family = family
        self._numbers: dict[Labels, float] = {} if names else {(): 0}
        registry.register(self)

    def add(self, *labels: str, number: float = 1) -> None:
        """So many more."""
        self._numbers[labels] = self._numbers.get(labels, 0) + number

    def __iter__(self) -> Iterator[Labels]:
        return iter(tuple(self._numbers))

    def remove(self, labels: Labels) -> None:
        """Forget one series."""
        del self._numbers[labels]

    def collect(self) -> Iterable[Metric]:
        """All series."""
        family = self._family(*self._head, labels=self.names)
        for labels, number in self._numbers.items():
            family.add_metric(labels, number)
        yield family


class Distribution(Collector):
    """A histogram. ``bounds``: the upper ones of its buckets, the last of which has none."""

    def __init__(
        self,
        name: str,
        text: str,
        names: Sequence[str],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self.names = tuple(names)
        self._head = name, text
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def begin(self, *labels: str) -> None:
        """Have a series before its first value, so that a rate knows that one."""
        if labels not in self._counts:
            self._counts[labels], self._sums[labels] = [0] * (len(self._bounds) + 1), 0.0

    def observe(self, value: float, *labels: str) -> None:
        """One value."""
        if labels not in self._counts:
            self.begin(*labels)
        self._counts[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def __iter__(self) -> Iterator[Labels]:
        return iter(tuple(self._counts))

    def remove(self, labels: Labels) -> None:
        """Forget one series."""
        del self._counts[labels], self._sums[labels]

    def collect(self) -> Iterable[Metric]:
        """All series."""
        family = HistogramMetricFamily(*self._head, labels=self.names)
        bounds = [*(str(float(one)) for one in self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family
