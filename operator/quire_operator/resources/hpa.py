"""The HorizontalPodAutoscaler.

Its metrics are Object metrics of the LLMDeployment: sums over its ready pods, which Quire's metrics adapter
serves. With `AverageValue` it computes ceil(sum / target) independently of the current number of pods, so
that loading pods do not cause further scale-ups (ADR 17). It scales the Deployment, never the LLMDeployment.
"""

from __future__ import annotations

from quire_operator import names, quantity
from quire_operator.resources import scaling_behavior
from quire_operator.resources.manifest import Manifest, metadata, workload_reference
from quire_operator.resources.scaling_behavior import PodMeasurements
from quire_operator.spec import Autoscaling, LLMDeployment


def build(model: LLMDeployment, scaling: Autoscaling, measured: PodMeasurements) -> Manifest:
    """The HPA of an LLMDeployment with backend HPA."""
    targets = scaling_behavior.targets(model, scaling)
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(model, model.workload_name),
        "spec": {
            "scaleTargetRef": workload_reference(model),
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [_metric(model, *pair) for pair in targets.items()],
            "behavior": scaling_behavior.behavior(scaling, measured, targets.get("GPUUtilization")),
        },
    }


def _metric(model: LLMDeployment, kind: str, target: int) -> Manifest:
    metrics = names.METRICS_OF_PREFILL if model.role == names.ROLE_PREFILL else names.METRICS
    return {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": model.name},
            "metric": {"name": metrics[kind]},
            "target": {"type": "AverageValue", "averageValue": _quantity(kind, target)},
        },
    }


def _quantity(kind: str, target: int) -> str:
    """In canonical form, as the API server writes it: 80 percent is 800m, a thousand requests are 1k."""
    return quantity.canonical(f"{target * 10}m" if kind in names.SHARES else str(target))
