"""The HorizontalPodAutoscaler: how many pods there are between the least and the most.

Its metrics describe the LLMDeployment as one object: sums over its ready pods, which Quire's metrics adapter
serves. `AverageValue` then asks for ceil(sum / target) pods whatever their number is now, so that pods that
load do not ask for more pods (ADR 17). It scales the Deployment, never the LLMDeployment.
"""

from __future__ import annotations

from quire_operator import names, quantity
from quire_operator.resources import pace
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.resources.pace import Measured
from quire_operator.spec import Autoscaling, LLMDeployment


def build(model: LLMDeployment, scaling: Autoscaling, measured: Measured) -> Manifest:
    """One for an LLMDeployment whose backend is HPA."""
    targets = pace.targets(model, scaling)
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(model, model.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": model.name},
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [_metric(model, *pair) for pair in targets.items()],
            "behavior": pace.behavior(scaling, measured, targets.get("GPUUtilization")),
        },
    }


def _metric(model: LLMDeployment, kind: str, target: int) -> Manifest:
    return {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": model.name},
            "metric": {"name": names.METRICS[kind]},
            "target": {"type": "AverageValue", "averageValue": _quantity(kind, target)},
        },
    }


def _quantity(kind: str, target: int) -> str:
    """As the API server spells it: a share of 80 percent is 800m, a thousand requests are 1k."""
    return quantity.canonical(f"{target * 10}m" if kind in names.SHARES else str(target))
