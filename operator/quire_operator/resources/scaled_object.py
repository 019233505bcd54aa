"""KEDA's ScaledObject: like the HorizontalPodAutoscaler between minimum and maximum, and to zero when
idle.

KEDA creates a HorizontalPodAutoscaler for it. Each metric is a trigger that reads one number from Quire's
metrics adapter over HTTP, which answers an error where it has no value (ADR 22). `AverageValue` for the same
reason as in `hpa`. It scales the Deployment, never the LLMDeployment.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.resources import scaling_behavior
from quire_operator.resources.manifest import Manifest, metadata, workload_reference
from quire_operator.resources.scaling_behavior import PodMeasurements
from quire_operator.spec import Autoscaling, LLMDeployment
from quire_operator.spec.schema import Idle


def build(model: LLMDeployment, scaling: Autoscaling, measured: PodMeasurements, load_url: str) -> Manifest:
    """The ScaledObject of an LLMDeployment with backend KEDA. `load_url`: of the metrics adapter's load API.

    Raises SpecError where there is no metrics adapter.
    """
    if not load_url:
        raise SpecError(
            "spec.autoscaling.backend",
            "KEDA gets the load from Quire's metrics adapter, which is off here: have metricsAdapter.enabled "
            "set in the chart (and watchNamespaces not), or set backend to External and bring a ScaledObject",
        )
    targets = scaling_behavior.targets(model, scaling)
    behavior = scaling_behavior.behavior(scaling, measured, targets.get("GPUUtilization"))
    triggers = [_trigger(model, scaling, load_url, *pair) for pair in targets.items()]
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(model, model.name),
        "spec": {
            "scaleTargetRef": workload_reference(model),
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            **(_idle(scaling.idle) if scaling.idle is not None else {}),
            **_fallback(scaling),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [*triggers, *(_activation(scaling.idle) if scaling.idle is not None else [])],
        },
    }


def _trigger(model: LLMDeployment, scaling: Autoscaling, load_url: str, kind: str, target: int) -> Manifest:
    """With scale to zero, no pods is no failure: the metrics adapter then reports 0 instead of an error."""
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
    """A push trigger, with which the activator notifies KEDA of the first request."""
    if idle.activator is None:
        return []
    address = {**idle.activator.metadata, "scalerAddress": idle.activator.scaler_address}
    return [{"type": "external-push", "name": "Activator", "metadata": address}]


def _fallback(scaling: Autoscaling) -> Manifest:
    """Never fewer pods than there are: KEDA's default would scale down while the load is unknown."""
    if scaling.fallback is None:
        return {}
    return {
        "fallback": {
            "replicas": scaling.fallback.replicas,
            "failureThreshold": scaling.fallback.failure_threshold,
            "behavior": "currentReplicasIfHigher",
        }
    }
