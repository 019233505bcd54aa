"""Makes metrics that carry one fixed set of label values, and the buckets that several of them share.

Knows no metric's name.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: vLLM's, of everything that takes as long as a request.
VLLM_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

#: The labels of an OpenMetrics exemplar: the trace in which one of the observations was made.
Exemplar = dict[str, str]


class Labelled:
    """One registry and one set of labels."""

    def __init__(self, registry: CollectorRegistry, values: dict[str, str]) -> None:
        self._registry = registry
        self.values = values

    def counter(self, name: str, about: str) -> Counter:
        """A counter with nothing but these labels."""
        return Counter(name, about, list(self.values), registry=self._registry).labels(**self.values)

    def counter_by(self, name: str, about: str, label: str) -> Counter:
        """A counter with one label more."""
        return Counter(name, about, [*self.values, label], registry=self._registry)

    def gauge(self, name: str, about: str) -> Gauge:
        """A gauge with nothing but these labels."""
        return Gauge(name, about, list(self.values), registry=self._registry).labels(**self.values)

    def histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with nothing but these labels."""
        return Histogram(name, about, list(self.values), buckets=buckets, registry=self._registry).labels(
            **self.values
        )

    def info(self, name: str, about: str, facts: dict[str, str]) -> None:
        """A gauge that is 1 and whose labels are the information."""
        labels = {**self.values, **facts}
        Gauge(name, about, list(labels), registry=self._registry).labels(**labels).set(1)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, as far as ``most``; vLLM's buckets for numbers of tokens."""
    series = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(value for value in series if value <= most) or (1,)
