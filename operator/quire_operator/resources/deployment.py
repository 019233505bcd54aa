"""The Deployment: how many serving pods there are and how they are replaced."""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment, Rollout

# A pod that may take the whole startup time, after a wait for a node, is late only some minutes later.
_PROGRESS_MARGIN_SECONDS = 300


def build(model: LLMDeployment, template: Manifest) -> Manifest:
    """`template`: of the pods."""
    rollout = model.spec.rollout
    min_ready = {"minReadySeconds": rollout.min_ready_seconds} if rollout.min_ready_seconds else {}
    paused = {"paused": True} if rollout.paused else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(model, model.name),
        "spec": {
            "replicas": model.replicas,
            "selector": {"matchLabels": names.selector_labels(model.name)},
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
    """What a pod may take for its download, before it loads."""
    cache = model.spec.cache
    return 0 if cache is None or cache.is_shared else cache.download.timeout_seconds


def _strategy(rollout: Rollout) -> Manifest:
    """As Auto begins: it surges."""
    if rollout.strategy == "Recreate":
        return {"type": "Recreate"}
    numbers = {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    if rollout.strategy == "InPlace":
        numbers = {"maxSurge": 0, "maxUnavailable": max(1, rollout.max_unavailable)}
    return {"type": "RollingUpdate", "rollingUpdate": numbers}
