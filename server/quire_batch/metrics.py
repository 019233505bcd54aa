"""The metrics of one worker, with no text of a client's. Nothing is global."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_batch.records import OPEN

_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
Counts = tuple[dict[str, int], float | None]


class Metrics:
    """``counts``: what is not over, by status, and since when; asked for with each scrape, and may raise."""

    def __init__(self, counts: Callable[[], Counts], clock: Callable[[], float] = time.time) -> None:
        self.registry = registry = CollectorRegistry()
        self.lines = Counter(
            "batch_lines",
            "Lines that were done, have failed by what they ask for, or by an error of servers.",
            ["status"],
            registry=registry,
        )
        self.retries = Counter(
            "batch_line_retries", "Lines that wait again, by why.", ["reason"], registry=registry
        )
        self.in_flight = Gauge("batch_lines_in_flight", "Lines that are asked for.", registry=registry)
        self.limit = Gauge(
            "batch_concurrency_limit",
            "Lines that may be asked for at once, of all batches together.",
            registry=registry,
        )
        self.seconds = Histogram(
            "batch_line_seconds",
            "How long the gateway took to answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.ended = Counter(
            "batch_batches", "Batches and jobs by how they ended.", ["status"], registry=registry
        )
        self.webhooks = Counter("batch_webhooks", "Reports of jobs.", ["status"], registry=registry)
        self.store_errors = Counter(
            "batch_store_errors", "Failures of the database, or of the files' store.", registry=registry
        )
        self._begin()
        registry.register(_Open(counts, clock))

    def _begin(self) -> None:
        """All series are there from the start: a rate is of what comes after the first sample."""
        for counter, values in (
            (self.lines, ("done", "failed", "error")),
            (self.retries, ("refused", "again")),
            (self.ended, ("completed", "failed", "expired", "cancelled")),
            (self.webhooks, ("delivered", "failed")),
        ):
            for value in values:
                counter.labels(value)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class _Open(Collector):
    """What is not over; nothing while the database is away."""

    def __init__(self, counts: Callable[[], Counts], clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked for when it is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The two metrics."""
        try:
            by_status, oldest = self._counts()
        except Exception:  # the database is away: a scrape says what else there is
            return
        found = GaugeMetricFamily(
            "batch_open_batches", "Batches and jobs that are not over.", labels=["status"]
        )
        for status in OPEN:
            found.add_metric([status], by_status.get(status, 0))
        yield found
        age = 0.0 if oldest is None else max(self._clock() - oldest, 0.0)
        yield GaugeMetricFamily("batch_oldest_age_seconds", "Age of the oldest that is not over.", value=age)
