"""What moves with every step or every token: counted in plain numbers, and made into metrics when somebody
asks, since a server counts some thousand tokens a second and is asked every few seconds. Registered by
``metrics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

from quire_server.core.engine_stats import EngineStats

_INTER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_VLLM_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_VLLM_STEP_TOKENS = (1, *(8 * 2**power for power in range(12)))  # 8 to 16384


class Observations:
    """Values by where they lie between the bounds of all histograms that are made of them."""

    def __init__(self, *bounds: Sequence[float]) -> None:
        self._bounds = sorted({INF}.union(*bounds))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(
        self, name: str, about: str, bounds: Sequence[float], labels: Mapping[str, str]
    ) -> HistogramMetricFamily:
        """With some of the bounds."""
        up_to = dict(zip(self._bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(name, about, labels=list(labels))
        buckets = [(_name(bound), up_to[bound]) for bound in (*bounds, INF)]
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class StepCollector(Collector):
    """Metric families of the engine's latest report and of all that went before."""

    def __init__(self, ours: Mapping[str, str], vllm: Mapping[str, str]) -> None:
        self._ours = ours
        self._vllm = vllm
        self._stats = EngineStats()
        self._tokens = 0
        self._gaps = Observations(_INTER_TOKEN, _VLLM_INTER_TOKEN)
        self._batches = Observations(_BATCH)
        self._step_tokens = Observations(_VLLM_STEP_TOKENS)

    def report(self, stats: EngineStats) -> None:
        """The engine reported."""
        self._stats = stats
        if stats.batch_size:
            self._batches.add(stats.batch_size)
            self._step_tokens.add(stats.step_tokens)

    def generated(self, num_tokens: int, seconds_each: float | None) -> None:
        """Tokens came together; ``seconds_each`` is the gap before each (None for the first of an answer)."""
        self._tokens += num_tokens
        if seconds_each is not None:
            self._gaps.add(seconds_each)

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included, so that every series exists from the start."""
        stats, ours, vllm = self._stats, self._ours, self._vllm
        name, alias = "llm_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"
        yield self._gaps.histogram(name, "Time between two tokens.", _INTER_TOKEN, ours)
        yield self._gaps.histogram(alias, f"Alias of {name}.", _VLLM_INTER_TOKEN, vllm)
        yield self._batches.histogram("llm_batch_size", "Requests in one step of the engine.", _BATCH, ours)
        name = "vllm:iteration_tokens_total"
        about = "Tokens computed in one step of the engine."
        yield self._step_tokens.histogram(name, about, _VLLM_STEP_TOKENS, vllm)
        yield from self._counter(
            "llm_tokens_generated", "vllm:generation_tokens", "Tokens generated.", self._tokens
        )
        about = "Requests that had to give their KV blocks to others for a while."
        yield from self._counter("llm_preemptions", "vllm:num_preemptions", about, stats.preemptions)
        about = "Requests that wait for the engine."
        waiting = stats.waiting + stats.deferred
        yield from self._gauge("llm_queue_depth", "vllm:num_requests_waiting", about, waiting)
        yield self._waiting_by_reason()
        about = "Requests that the engine is working on."
        yield from self._gauge("llm_running_requests", "vllm:num_requests_running", about, stats.running)
        about, share = "Share of the KV cache in use, 0 to 1.", stats.kv_utilization
        yield from self._gauge("llm_kv_cache_utilization", "vllm:kv_cache_usage_perc", about, share)
        about = "KV blocks that are neither free nor anybody's: 0 in a sound server."
        yield from self._gauge("llm_kv_blocks_unaccounted", None, about, stats.blocks_unaccounted)

    def _waiting_by_reason(self) -> Metric:
        """vLLM's words: `capacity` waits for room, `deferred` for something else, here for its grammar."""
        name = "vllm:num_requests_waiting_by_reason"
        family = GaugeMetricFamily(name, "Requests that wait, by what for.", labels=[*self._vllm, "reason"])
        for reason, value in (("capacity", self._stats.waiting), ("deferred", self._stats.deferred)):
            family.add_metric([*self._vllm.values(), reason], value)
        return family

    def _counter(self, name: str, alias: str, about: str, value: int) -> Iterator[Metric]:
        for one, text, labels in (
            (name, about, self._ours),
            (alias, f"Alias of {name}_total.", self._vllm),
        ):
            counter = CounterMetricFamily(one, text, labels=list(labels))
            counter.add_metric(list(labels.values()), value)
            yield counter

    def _gauge(self, name: str, alias: str | None, about: str, value: float) -> Iterator[Metric]:
        named = [(name, about, self._ours)]
        if alias is not None:
            named.append((alias, f"Alias of {name}.", self._vllm))
        for one, text, labels in named:
            gauge = GaugeMetricFamily(one, text, labels=list(labels))
            gauge.add_metric(list(labels.values()), value)
            yield gauge


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # the library does not annotate it
