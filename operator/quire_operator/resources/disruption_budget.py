"""The PodDisruptionBudget: how many pods a node drain may evict at once.

With `AlwaysAllow` pods that are not ready may be evicted at any time (`protectWhileLoading` keeps autoscalers
from evicting those that load). `plan.disruption_budget` raises `maxUnavailable` by the replicas that find no
place, so that one ready pod may always be evicted. A group of pods ends with any of them, so the budget
counts workers as well: while a pod of one group is away, no pod of another one is evicted.
"""

from __future__ import annotations

from quire_operator.resources.manifest import Manifest, metadata, pods_of_ranks
from quire_operator.spec import LLMDeployment


def build(model: LLMDeployment) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, model.workload_name),
        "spec": {
            "maxUnavailable": model.spec.disruption.max_unavailable,
            "selector": pods_of_ranks(model),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
