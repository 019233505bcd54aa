"""The Deployment: how many serving pods there are and how they are replaced."""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, compact, metadata
from quire_operator.spec import LLMDeployment, Rollout

# Beyond the time that a pod may take to start, for a wait for a node.
_PROGRESS_MARGIN_SECONDS = 300


def build(model: LLMDeployment, template: Manifest) -> Manifest:
    """`template`: the pod template."""
    rollout = model.spec.rollout
    min_ready = {"minReadySeconds": rollout.min_ready_seconds} if rollout.min_ready_seconds else {}
    paused = {"paused": True} if rollout.paused else {}
    described = metadata(model, model.workload_name)
    # Kueue copies it to the pods, which then wait for quota of that queue.
    described["labels"] |= compact({names.LABEL_QUEUE: model.spec.scheduling.queue_name})
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": described,
        "spec": {
            "replicas": model.replicas,
            "selector": {"matchLabels": names.selector_labels(model.name, model.role)},
            "strategy": _strategy(rollout),
            "progressDeadlineSeconds": (
                model.spec.health.startup_timeout_seconds
                + _download_seconds(model)
                + rollout.surge_wait_seconds
                + _PROGRESS_MARGIN_SECONDS
            ),
            **min_ready,
            **paused,
            "template": template,
        },
    }


def _download_seconds(model: LLMDeployment) -> int:
    """How long a pod may download its model before it loads it."""
    cache = model.spec.cache
    return 0 if cache is None or cache.is_shared else cache.download.timeout_seconds


def _strategy(rollout: Rollout) -> Manifest:
    """The strategy that the spec gives; Auto starts as Surge."""
    if rollout.strategy == "Recreate":
        return {"type": "Recreate"}
    numbers = {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    if rollout.strategy == "InPlace":
        numbers = {"maxSurge": 0, "maxUnavailable": max(1, rollout.max_unavailable)}
    return {"type": "RollingUpdate", "rollingUpdate": numbers}
