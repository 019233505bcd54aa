"""Rules of `autoscaling` that join several fields. The CRD has them in CEL.

`rules.check` calls them, and the same table of cases (e2e/api) drives both.
"""

from __future__ import annotations

from quire_operator import names
from quire_operator.errors import SpecError
from quire_operator.spec.replicas import Autoscaling
from quire_operator.spec.tree import Spec


def check(spec: Spec) -> None:
    """Every rule, in the order of the fields."""
    scaling = spec.autoscaling
    if scaling is None:
        return
    if spec.replicas is not None:
        raise SpecError(
            "spec.autoscaling", "only one can say how many pods there are: drop this, or spec.replicas"
        )
    if scaling.min_replicas > scaling.max_replicas:
        raise SpecError(
            "spec.autoscaling.minReplicas",
            "above maxReplicas: lower it, or raise spec.autoscaling.maxReplicas",
        )
    _check_metrics(scaling, has_gpu=spec.resources.accelerator is not None)
    _check_keda(scaling)


def _check_metrics(scaling: Autoscaling, *, has_gpu: bool) -> None:
    types = [metric.type for metric in scaling.metrics]
    for index, metric in enumerate(scaling.metrics):
        path = f"spec.autoscaling.metrics[{index}]"
        if metric.type in types[:index]:
            raise SpecError(f"{path}.type", f"{metric.type} is given twice")
        if metric.type in names.SHARES and (metric.target_per_replica or 0) > 100:
            raise SpecError(f"{path}.targetPerReplica", f"{metric.type} is a percentage: give 100 at most")
        if metric.type == "GPUUtilization" and not has_gpu:
            raise SpecError(f"{path}.type", "without a GPU nothing reports it: set resources.gpu, or drop it")


def _check_keda(scaling: Autoscaling) -> None:
    for name, given in (("idle", scaling.idle), ("fallback", scaling.fallback)):
        if given is not None and scaling.backend not in ("Auto", "KEDA"):
            raise SpecError(
                f"spec.autoscaling.{name}", "only KEDA can do that: set backend to Auto or KEDA, or drop it"
            )
    counted = {metric.type for metric in scaling.metrics}
    if scaling.idle is not None and counted and "RunningRequests" not in counted:
        raise SpecError(
            "spec.autoscaling.idle",
            "give RunningRequests in metrics too: without it a replica that answers would count as idle",
        )
