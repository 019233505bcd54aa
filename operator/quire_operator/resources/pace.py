"""What one replica should carry, and how fast their number changes: the same for every kind of autoscaler.

Called by the builders of autoscalers, of which it knows none; `behavior` is in the words of autoscaling/v2,
which KEDA takes as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_operator.resources.manifest import Manifest
from quire_operator.spec import Autoscaling, LLMDeployment

QUEUED_PER_REPLICA = 10
SHARE_OF_BATCH = 0.75  # beyond that, a running request slows the others more than another pod would
PERCENT_PER_REPLICA = 80
# What the server takes where engine.maxNumSeqs is absent; a contract test compares the two.
DEFAULT_BATCH = 64

# A pod that loads cannot help yet: the number grows once in the time of a load. Rounded up, so that no two
# loads of about the same length rewrite the autoscaler.
LOAD_PERIODS = (15, 30, 60, 120, 240, 480, 900, 1800)
UNKNOWN_LOAD_PERIOD = 60

# GPUs that work between this share of their target and the target are neither too few nor too many: 30 of 80.
SHRINK_BELOW = 3 / 8
# What was allowed to shrink is held again only this far above, so that a mean on the edge changes nothing.
HOLD_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the pods that run. `load_seconds`: of the last load of the model; `gpu_percent`: the
    mean utilization of their GPUs; `is_held`: whether the autoscaler may not shrink now.
    """

    load_seconds: int | None = None
    gpu_percent: float | None = None
    is_held: bool = False


def targets(model: LLMDeployment, scaling: Autoscaling) -> dict[str, int]:
    """What one replica should carry, by metric. The queue alone would be empty, and pods would go, as soon as
    enough of them run all requests: so without a word of the user's, running requests count too.
    """
    batch = model.spec.engine.max_num_seqs or DEFAULT_BATCH
    defaults = {
        "QueueDepth": QUEUED_PER_REPLICA,
        "RunningRequests": max(1, int(batch * SHARE_OF_BATCH)),
        "KVCacheUtilization": PERCENT_PER_REPLICA,
        "GPUUtilization": PERCENT_PER_REPLICA,
    }
    if not scaling.metrics:
        return {kind: defaults[kind] for kind in ("QueueDepth", "RunningRequests")}
    return {metric.type: metric.target_per_replica or defaults[metric.type] for metric in scaling.metrics}


def behavior(scaling: Autoscaling, measured: Measured, gpu_target: int | None) -> Manifest:
    """`gpu_target`: percent of GPUUtilization, None where that is not counted."""
    up, down = scaling.behavior.scale_up, scaling.behavior.scale_down
    period = up.period_seconds or _load_period(measured.load_seconds)
    holds = gpu_target is not None and _holds(measured, gpu_target)
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


def _holds(measured: Measured, gpu_target: int) -> bool:
    """Whether the GPUs work too much for fewer of them. An autoscaler by itself knows one target, and would
    shrink as soon as one replica fewer stayed below it.
    """
    if measured.gpu_percent is None:
        return True
    return measured.gpu_percent >= gpu_target * SHRINK_BELOW * (1 if measured.is_held else HOLD_MARGIN)


def _load_period(load_seconds: int | None) -> int:
    if load_seconds is None:
        return UNKNOWN_LOAD_PERIOD
    return next((period for period in LOAD_PERIODS if period >= load_seconds), LOAD_PERIODS[-1])
