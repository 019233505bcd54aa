"""The table of metrics: their names, the server metrics that they are computed from, and their valid
range.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator import names


@dataclass(frozen=True)
class LoadMetric:
    """One metric of an LLMDeployment: the sum over its ready pods in a role.

    A pod may have several series of `source` (one per GPU): their mean counts where `is_share` (0 to 1), else
    their sum.
    """

    name: str
    source: str  # name in the pods' /metrics
    is_share: bool
    highest: float  # of one series; larger values are invalid
    role: str = names.ROLE_LEADER  # of the pods


_REQUESTS = 1e6  # per pod: far more than any server admits

METRICS = {
    metric.name: metric
    for metric in (
        LoadMetric("llm_queue_depth", "llm_queue_depth", False, _REQUESTS),
        LoadMetric("llm_running_requests", "llm_running_requests", False, _REQUESTS),
        LoadMetric("llm_kv_cache_utilization", "llm_kv_cache_utilization", True, 1.0),
        LoadMetric("llm_gpu_utilization", "llm_gpu_utilization_ratio", True, 1.0),
        LoadMetric("llm_prefill_queue_depth", "llm_queue_depth", False, _REQUESTS, names.ROLE_PREFILL),
    )
}
