"""The Deployment: how many serving pods there are and how they are replaced."""

from __future__ import annotations

from quire_operator import names
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.spec import LLMDeployment

# A pod that may take the whole startup time is late only some minutes after it.
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
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "progressDeadlineSeconds": model.spec.health.startup_timeout_seconds + _PROGRESS_MARGIN_SECONDS,
            **min_ready,
            **paused,
            "template": template,
        },
    }
