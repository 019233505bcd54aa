"""KEDA's ScaledObject: between the least and the most as a HorizontalPodAutoscaler, and below it when idle.

KEDA makes a HorizontalPodAutoscaler of it. Each metric is a trigger that asks Quire's metrics adapter for one
number over HTTP, which answers an error while it does not know (ADR 22). `AverageValue` as in `hpa`, and for
the same reason. It scales the Deployment, never the LLMDeployment.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources import pace
from quire_operator.resources.manifest import Manifest, metadata
from quire_operator.resources.pace import Measured
from quire_operator.spec import Autoscaling, LLMDeployment
from quire_operator.spec.replicas import Idle


def build(model: LLMDeployment, scaling: Autoscaling, measured: Measured, load_url: str) -> Manifest:
    """One for an LLMDeployment whose backend is KEDA. `load_url`: where the metrics adapter tells loads.

    Raises SpecError where there is no metrics adapter.
    """
    if not load_url:
        raise SpecError(
            "spec.autoscaling.backend",
            "KEDA gets the load from Quire's metrics adapter, which is off here: have metricsAdapter.enabled "
            "set in the chart (and watchNamespaces not), or set backend to External and bring a ScaledObject",
        )
    targets = pace.targets(model, scaling)
    behavior = pace.behavior(scaling, measured, targets.get("GPUUtilization"))
    triggers = [_trigger(model, scaling, load_url, *pair) for pair in targets.items()]
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(model, model.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": model.name},
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            **(_idle(scaling.idle) if scaling.idle is not None else {}),
            **_fallback(scaling),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [*triggers, *(_activation(scaling.idle) if scaling.idle is not None else [])],
        },
    }


def _trigger(model: LLMDeployment, scaling: Autoscaling, load_url: str, kind: str, target: int) -> Manifest:
    """Asleep there are no pods, which is no failure: only then is nothing counted as 0."""
    metric = names.METRICS[kind]
    if_none = "?ifNone=0" if scaling.idle is not None else ""
    return {
        "type": "metrics-api",
        "name": kind,
        "metricType": "AverageValue",
        "metadata": {
            "url": f"{load_url}/{model.namespace}/{model.name}/{metric}{if_none}",
            "valueLocation": metric,
            "targetValue": f"{target / 100:g}" if kind in names.SHARES else str(target),
        },
    }


def _idle(idle: Idle) -> Manifest:
    return {"idleReplicaCount": idle.replicas, "cooldownPeriod": idle.after_seconds}


def _activation(idle: Idle) -> list[Manifest]:
    """Who holds the first request tells KEDA of it at once."""
    if idle.activator is None:
        return []
    told = {**idle.activator.metadata, "scalerAddress": idle.activator.scaler_address}
    return [{"type": "external-push", "name": "Activator", "metadata": told}]


def _fallback(scaling: Autoscaling) -> Manifest:
    """Those that are there stay: KEDA's own default would take pods away from a load that nobody can see."""
    if scaling.fallback is None:
        return {}
    return {
        "fallback": {
            "replicas": scaling.fallback.replicas,
            "failureThreshold": scaling.fallback.failure_threshold,
            "behavior": "currentReplicasIfHigher",
        }
    }
