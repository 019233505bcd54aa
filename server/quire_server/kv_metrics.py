"""The KV cache's part of /metrics: prefix cache, pins, tiers. Registered by ``metrics``.

Reads the engine's latest report when somebody asks, so that a step pays nothing for it. After a restart of
the engine its counters start at zero, which Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quire_server.core.kv_stats import KVStats


class KVCollector(Collector):
    """Metric families made of ``stats``, which is replaced with each report."""

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
