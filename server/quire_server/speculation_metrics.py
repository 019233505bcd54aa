"""Speculative decoding's part of /metrics. Registered by ``metrics``.

Reads the engine's latest report when somebody asks, as ``kv_metrics`` does. Acceptance is a quotient of these
counters: accepted tokens / draft tokens; accepted tokens at a position / drafts; 1 + accepted tokens / drafts
is what a step with drafts brings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from quire_server.core.speculation_stats import SpeculationStats


class SpeculationCollector(Collector):
    """Metric families made of ``stats``, which is replaced with each report."""

    def __init__(self, ours: Mapping[str, str], vllm: Mapping[str, str]) -> None:
        self.stats = SpeculationStats()
        self._ours = ours
        self._vllm = vllm

    def collect(self) -> Iterator[Metric]:
        """All families, zeros included; positions as soon as the engine has told how many there are."""
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


def _counter(name: str, about: str, labels: Mapping[str, str], value: int) -> Metric:
    family = CounterMetricFamily(name, about, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
