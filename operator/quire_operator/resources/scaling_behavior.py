"""The metric targets per replica, and the scale-up and scale-down policies: the same for every kind of
autoscaler.

`behavior` is in the terms of autoscaling/v2, which KEDA accepts as well. Knows no kind of autoscaler.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator.resources.manifest import Manifest
from quire_operator.spec import Autoscaling, LLMDeployment

QUEUED_PER_REPLICA = 10
SHARE_OF_BATCH = 0.75  # above it, one more running request slows down the others more than adding a pod costs
PERCENT_PER_REPLICA = 80
# The server's defaults where engine.maxNumSeqs is absent; a contract test compares them.
DEFAULT_BATCH, DEFAULT_GPU_BATCH = 64, 256

# A loading pod takes no load yet, so the number grows once per load time. Rounded up to one of these, so that
# loads of similar duration do not rewrite the autoscaler.
LOAD_PERIODS = (15, 30, 60, 120, 240, 480, 900, 1800)
UNKNOWN_LOAD_PERIOD = 60

# No scale-down while GPU utilization is above this share of its target: 30 of 80.
SCALE_DOWN_BELOW = 3 / 8
# Scale-down is disabled again only this factor above the threshold, as hysteresis.
HYSTERESIS = 1.1


@dataclass(frozen=True, kw_only=True)
class PodMeasurements:
    """Measurements of the running pods. `load_seconds`: duration of the last load; `gpu_percent`: mean
    utilization of their GPUs; `scale_down_disabled`: whether the autoscaler may not scale down now.
    """

    load_seconds: int | None = None
    gpu_percent: float | None = None
    scale_down_disabled: bool = False


def batch(model: LLMDeployment) -> int:
    """How many requests one of its pods runs together."""
    default = DEFAULT_BATCH if model.spec.resources.accelerator is None else DEFAULT_GPU_BATCH
    return model.spec.engine.max_num_seqs or default


def targets(model: LLMDeployment, scaling: Autoscaling) -> dict[str, int]:
    """The target per replica, by metric. By default the queue and the running requests count: with the queue
    alone, the autoscaler would scale down as soon as all requests run. Of decode pods the use of the KV cache
    counts instead: it has their requests and the prefixes that they read.
    """
    defaults = {
        "QueueDepth": QUEUED_PER_REPLICA,
        "RunningRequests": max(1, int(batch(model) * SHARE_OF_BATCH)),
        "KVCacheUtilization": PERCENT_PER_REPLICA,
        "GPUUtilization": PERCENT_PER_REPLICA,
    }
    if not scaling.metrics:
        busy = "RunningRequests" if model.spec.disaggregation is None else "KVCacheUtilization"
        return {kind: defaults[kind] for kind in ("QueueDepth", busy)}
    return {metric.type: metric.target_per_replica or defaults[metric.type] for metric in scaling.metrics}


def behavior(scaling: Autoscaling, measured: PodMeasurements, gpu_target: int | None) -> Manifest:
    """`gpu_target`: percent of GPUUtilization, None where that is not a metric."""
    up, down = scaling.behavior.scale_up, scaling.behavior.scale_down
    period = up.period_seconds or _load_period(measured.load_seconds)
    holds = gpu_target is not None and _disables_scale_down(measured, gpu_target)
    percent = [{"type": "Percent", "value": up.percent, "periodSeconds": period}] if up.percent else []
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": up.stabilization_window_seconds,
            "selectPolicy": "Max",
            "policies": [{"type": "Pods", "value": up.pods, "periodSeconds": period}, *percent],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": down.stabilization_window_seconds,
            "selectPolicy": "Disabled" if holds else "Max",
            "policies": [{"type": "Pods", "value": down.pods, "periodSeconds": down.period_seconds}],
        },
    }


def _disables_scale_down(measured: PodMeasurements, gpu_target: int) -> bool:
    """Whether GPU utilization is too high to scale down. An autoscaler alone has one target, and would scale
    down as soon as one replica fewer stayed below it.
    """
    if measured.gpu_percent is None:
        return True
    return measured.gpu_percent >= gpu_target * SCALE_DOWN_BELOW * (
        1 if measured.scale_down_disabled else HYSTERESIS
    )


def _load_period(load_seconds: int | None) -> int:
    if load_seconds is None:
        return UNKNOWN_LOAD_PERIOD
    return next((period for period in LOAD_PERIODS if period >= load_seconds), LOAD_PERIODS[-1])
