"""Metrics of the ranks of one model, on whichever node they run: who is slow, who is silent, how much they
exchange.

They are read when /metrics is. A server with one rank has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class RankSample:
    """One rank. ``host``: its machine or pod. The others are as the metrics say."""

    rank: int
    host: str
    steps: int
    busy_seconds: float
    silence_seconds: float
    exchanged_bytes: int


class RankCollector(Collector):
    """``read`` gives the ranks as they are now; it is replaced when they are known."""

    def __init__(self, ours: Mapping[str, str]) -> None:
        self._ours = ours
        self.read: Callable[[], Sequence[RankSample]] = tuple

    def collect(self) -> Iterator[Metric]:
        """All families; without series where one process has the whole model."""
        labels = [*self._ours, "rank", "host"]
        steps = CounterMetricFamily("llm_rank_steps", "Steps that the rank has executed.", labels=labels)
        busy = CounterMetricFamily(
            "llm_rank_busy_seconds",
            "Time in which the rank computed steps, without waits for other ranks; on GPUs with them.",
            labels=labels,
        )
        silence = GaugeMetricFamily(
            "llm_rank_silence_seconds",
            "Time for which the rank has not run, or has owed the answer to a step.",
            labels=labels,
        )
        exchanged = CounterMetricFamily(
            "llm_rank_exchanged_bytes", "Bytes that the rank exchanged with others in steps.", labels=labels
        )
        for one in self.read():
            values = [*self._ours.values(), str(one.rank), one.host]
            steps.add_metric(values, one.steps)
            busy.add_metric(values, one.busy_seconds)
            silence.add_metric(values, one.silence_seconds)
            exchanged.add_metric(values, one.exchanged_bytes)
        yield from (steps, busy, silence, exchanged)
