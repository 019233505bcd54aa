"""The metrics that are served: their names, what they are made of, and which values can be believed.

A table for everybody else in this package; it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadMetric:
    """One metric of an LLMDeployment: the sum over its ready pods of what each of them says.

    A pod may have several series of `source` (one for each GPU): it counts with their mean where `is_share`
    (0 to 1), else with their sum.
    """

    name: str
    source: str  # in the pods' /metrics
    is_share: bool
    highest: float  # of one series; more is a lie


_REQUESTS = 1e6  # in one pod: far beyond what any server admits

METRICS = {
    metric.name: metric
    for metric in (
        LoadMetric("llm_queue_depth", "llm_queue_depth", False, _REQUESTS),
        LoadMetric("llm_running_requests", "llm_running_requests", False, _REQUESTS),
        LoadMetric("llm_kv_cache_utilization", "llm_kv_cache_utilization", True, 1.0),
        LoadMetric("llm_gpu_utilization", "llm_gpu_utilization_ratio", True, 1.0),
    )
}
