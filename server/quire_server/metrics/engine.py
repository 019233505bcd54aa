"""Metrics of the engine: steps and tokens, the KV cache, speculative decoding.

They change with every step or token, thousands of times a second, and are read every few seconds: so they
are kept as plain numbers, and become metric families when /metrics is read.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

from quire_server.core.stats import AdapterStats, EngineStats, KVStats, SpeculationStats, TransferStats

_INTER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_VLLM_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_VLLM_STEP_TOKENS = (1, *(8 * 2**power for power in range(12)))  # 8 to 16384


class Observations:
    """Counts of values between the bounds of all histograms that are made of them."""

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
    """Steps and tokens: the engine's latest report and the sums over all reports."""

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
        """vLLM's reasons: `capacity` waits for room, `deferred` for its grammar or its prefix."""
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


class KVCollector(Collector):
    """Prefix cache, pinned blocks and offload tiers, from ``stats``, which is replaced with each report.

    After a restart of the engine its counters start at zero, which Prometheus expects of counters.
    """

    def __init__(self, ours: Mapping[str, str], vllm: Mapping[str, str]) -> None:
        self.stats = KVStats()
        self._ours = ours
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included, so that every series exists from the start."""
        stats = self.stats
        queries, hits = "llm_prefix_cache_query_tokens", "llm_prefix_cache_hit_tokens"
        yield self._counter(queries, "Tokens looked up in the prefix cache.", stats.prefix_queries)
        yield self._counter(hits, "Tokens found in the prefix cache, in any tier.", stats.prefix_hits)
        yield self._alias("vllm:prefix_cache_queries", queries, stats.prefix_queries)
        yield self._alias("vllm:prefix_cache_hits", hits, stats.prefix_hits)
        yield self._counter(
            "llm_kv_cache_evictions", "Cached KV blocks that were given away.", stats.evictions
        )
        pinned = GaugeMetricFamily(
            "llm_prefix_cache_pinned_blocks",
            "KV blocks that explicit prompt caching keeps.",
            labels=list(self._ours),
        )
        pinned.add_metric(list(self._ours.values()), stats.pinned)
        yield pinned
        yield self._counter(
            "llm_prefix_cache_pins_refused_blocks",
            "KV blocks for which there was no room among the pinned.",
            stats.pins_refused,
        )
        yield self._counter(
            "llm_swapped_requests", "Preempted requests whose KV blocks stayed on the host.", stats.swaps
        )
        yield self._counter(
            "llm_kv_tier_corrupt_blocks",
            "KV blocks that came back from a tier with a wrong checksum, or not at all; computed again.",
            stats.corrupt,
        )
        yield from self._tiers(stats)

    def _tiers(self, stats: KVStats) -> Iterator[Metric]:
        host = (stats.host_slots, stats.host_used, stats.host_stored, stats.host_loaded, stats.host_evicted)
        disk = (stats.disk_slots, stats.disk_used, stats.disk_stored, stats.disk_loaded, stats.disk_evicted)
        labels = [*self._ours, "tier"]
        families: tuple[Metric, ...] = (
            GaugeMetricFamily("llm_kv_tier_blocks", "KV blocks that a lower tier can hold.", labels=labels),
            GaugeMetricFamily("llm_kv_tier_used_blocks", "KV blocks in a lower tier.", labels=labels),
            CounterMetricFamily(
                "llm_kv_tier_stored_blocks", "KV blocks that went down to it.", labels=labels
            ),
            CounterMetricFamily(
                "llm_kv_tier_loaded_blocks", "KV blocks that came up from it.", labels=labels
            ),
            CounterMetricFamily("llm_kv_tier_evicted_blocks", "KV blocks it gave away.", labels=labels),
        )
        for name, values in (("host", host), ("disk", (0 if stats.disk_failed else disk[0], *disk[1:]))):
            for family, value in zip(families, values, strict=True):
                suffix = "_total" if isinstance(family, CounterMetricFamily) else ""
                family.add_sample(family.name + suffix, {**self._ours, "tier": name}, value)
        yield from families
        failed = GaugeMetricFamily(
            "llm_kv_tier_failed", "1 when the tier was given up after an error.", labels=labels
        )
        failed.add_metric([*self._ours.values(), "disk"], int(stats.disk_failed))
        yield failed

    def _counter(self, name: str, about: str, value: int) -> Metric:
        family = CounterMetricFamily(name, about, labels=list(self._ours))
        family.add_metric(list(self._ours.values()), value)
        return family

    def _alias(self, name: str, of: str, value: int) -> Metric:
        family = CounterMetricFamily(name, f"Alias of {of}_total.", labels=list(self._vllm))
        family.add_metric(list(self._vllm.values()), value)
        return family


class SpeculationCollector(Collector):
    """Speculative decoding, from ``stats``, which is replaced with each report.

    Acceptance is a quotient of these counters: accepted tokens / draft tokens; accepted tokens at a position
    / drafts; 1 + accepted tokens / drafts is the mean number of tokens of a step with drafts.
    """

    def __init__(self, ours: Mapping[str, str], vllm: Mapping[str, str]) -> None:
        self.stats = SpeculationStats()
        self._ours = ours
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included; positions once the engine has reported how many there are."""
        stats = self.stats
        totals = (
            ("num_drafts", "drafts", "Proposals of several tokens for one request.", stats.drafts),
            ("num_draft_tokens", "draft_tokens", "Tokens in them.", stats.draft_tokens),
            ("num_accepted_tokens", "accepted_tokens", "Of these, the model's own.", stats.accepted_tokens),
        )
        for alias, name, about, value in totals:
            ours = f"llm_spec_decode_{name}"
            yield _counter(ours, about, self._ours, value)
            yield _counter(f"vllm:spec_decode_{alias}", f"Alias of {ours}_total.", self._vllm, value)
        yield _counter(
            "llm_spec_decode_pauses",
            "Times that a request stopped drafting for a while, since it did not pay.",
            self._ours,
            stats.pauses,
        )
        ours = "llm_spec_decode_accepted_tokens_per_pos"
        yield self._by_position(ours, "Accepted tokens by their place in the draft.", self._ours)
        alias = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._by_position(alias, f"Alias of {ours}_total.", self._vllm)

    def _by_position(self, name: str, about: str, labels: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily(name, about, labels=[*labels, "position"])
        for position, value in enumerate(self.stats.accepted_per_position):
            family.add_metric([*labels.values(), str(position)], value)
        return family


class TransferCollector(Collector):
    """KV blocks from and for other servers, from ``stats``, which is replaced with each report."""

    def __init__(self, ours: Mapping[str, str]) -> None:
        self.stats = TransferStats()
        self._ours = ours

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included."""
        stats = self.stats
        about = "Prefixes of prompts whose KV blocks came from a kv_producer."
        yield _counter("llm_kv_transfers", about, self._ours, stats.succeeded)
        about = "Prefixes of prompts that were computed here, because no kv_producer gave them in time."
        yield _counter("llm_kv_transfer_failures", about, self._ours, stats.failed)
        about = "KV blocks that came from a kv_producer."
        yield _counter("llm_kv_transfer_blocks", about, self._ours, stats.blocks)
        about = "Prefixes whose KV blocks wait here for a kv_consumer to read them."
        held = GaugeMetricFamily("llm_kv_transfer_held", about, labels=list(self._ours))
        held.add_metric(list(self._ours.values()), stats.held)
        yield held


class AdapterCollector(Collector):
    """LoRA adapters, from ``stats``, which is replaced with each report, and ``requests`` by adapter."""

    def __init__(self, ours: Mapping[str, str], requests: Mapping[str, int]) -> None:
        self.stats = AdapterStats()
        self._ours, self._requests = ours, requests

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included; of requests those of adapters that had any."""
        stats, labels = self.stats, list(self._ours)
        for name, about, value in (
            ("llm_adapter_loaded", "LoRA adapters that requests may name.", stats.loaded),
            ("llm_adapter_resident", "LoRA adapters that are on the device.", stats.resident),
            ("llm_adapter_failed", "LoRA adapters whose last load failed.", stats.failed),
        ):
            gauge = GaugeMetricFamily(name, about, labels=labels)
            gauge.add_metric(list(self._ours.values()), value)
            yield gauge
        about = "Copies of LoRA adapters to the device."
        yield _counter("llm_adapter_slot_loads", about, self._ours, stats.slot_loads)
        family = CounterMetricFamily(
            "llm_adapter_requests", "Requests by their LoRA adapter.", labels=[*labels, "adapter"]
        )
        for adapter, count in list(self._requests.items()):
            family.add_metric([*self._ours.values(), adapter], count)
        yield family
        if stats.slots:
            yield self._in_use()

    def _in_use(self) -> Metric:
        """vLLM's, from which endpoint pickers read the adapters that a server computes with: the names are in
        labels, and the value is the time.
        """
        about, labels = (
            "LoRA adapters whose requests run or wait.",
            (
                "max_lora",
                "running_lora_adapters",
                "waiting_lora_adapters",
            ),
        )
        family = GaugeMetricFamily("vllm:lora_requests_info", about, labels=labels)
        stats = self.stats
        values = [str(stats.slots), ",".join(stats.running), ",".join(stats.waiting)]
        family.add_metric(values, time.time())
        return family


def _counter(name: str, about: str, labels: Mapping[str, str], value: int) -> Metric:
    family = CounterMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # the library does not annotate it
