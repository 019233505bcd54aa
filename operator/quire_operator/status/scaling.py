"""Whether the number of pods follows the load: the condition ScalingActive, and status.scaling.

Called by `status.of`. Mirrors what the HorizontalPodAutoscaler says of itself, and tells of a second
autoscaler of the same Deployment. Pure; decides about no pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_operator import names, quantity, reports
from quire_operator.errors import QuantityError
from quire_operator.observed import Body, Observed, seconds_since
from quire_operator.resources import Measured
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons

Decided = tuple[str, str, str]  # status, reason, message

# A pod that has just become ready is measured within seconds, and the autoscaler looks every 15.
METRICS_GRACE_SECONDS = 60.0
AWAITING = "AwaitingMetrics"
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_NO_METRICS = ("FailedGet", "FailedConvert", "InvalidMetric")


def condition(model: LLMDeployment, observed: Observed, *, ready: int, now: datetime) -> Decided | None:
    """ScalingActive; None where the spec gives the number and nobody else changes it. `ready`: pods."""
    if model.replicas == 0:
        is_meant = model.spec.autoscaling is not None
        return ("False", "Suspended", "No pods run: spec.suspend is true.") if is_meant else None
    rivals, who = observed.rivals, model.autoscaler
    if len(rivals) > (who == "External"):
        return _conflict(", ".join(sorted(_title(rival) for rival in rivals)))
    if not who:
        return None
    if who == "KEDA":
        return (
            "False",
            "BackendNotSupported",
            "KEDA is not supported yet: set spec.autoscaling.backend to HPA.",
        )
    own = rivals[0] if rivals else observed.child("HorizontalPodAutoscaler")
    if own is None and who == "External":
        return (
            "Unknown",
            "External",
            "Whoever scales the Deployment is no HorizontalPodAutoscaler that is seen.",
        )
    return _graced(_mirrored(own or {}), observed, ready, now)


def summary(model: LLMDeployment, observed: Observed) -> dict[str, Any]:
    """status.scaling; empty where the spec gives the number."""
    if not model.autoscaler:
        return {}
    child = observed.child("HorizontalPodAutoscaler")
    live = next(iter(observed.rivals), None) if model.autoscaler == "External" else child
    told = (live or {}).get("status") or {}
    known = {
        "autoscaler": live["metadata"]["name"] if live else None,
        "desiredReplicas": told.get("desiredReplicas"),
        "lastScaleTime": told.get("lastScaleTime"),
    }
    return {"backend": model.autoscaler} | {key: value for key, value in known.items() if value is not None}


def measured(body: Body, autoscaler: Body | None) -> Measured:
    """What is known of the pods that run, from the LLMDeployment `body` and our own `autoscaler`."""
    seconds = ((body.get("status") or {}).get("model") or {}).get("lastLoadSeconds")
    live = autoscaler or {}
    pace = ((live.get("spec") or {}).get("behavior") or {}).get("scaleDown") or {}
    return Measured(
        load_seconds=seconds if isinstance(seconds, int) else None,
        gpu_percent=_gpu_percent(live),
        is_held=pace.get("selectPolicy") == "Disabled",
    )


def _gpu_percent(autoscaler: Body) -> float | None:
    """The mean over the replicas that the autoscaler last read."""
    for metric in (autoscaler.get("status") or {}).get("currentMetrics") or ():
        told = metric.get("object") or {}
        if (told.get("metric") or {}).get("name") == names.METRICS["GPUUtilization"]:
            try:
                return float(quantity.parse(str((told.get("current") or {}).get("averageValue")))) * 100
            except QuantityError:
                return None
    return None


def awaits_metrics(status: Mapping[str, Any]) -> bool:
    """Whether ScalingActive will change with time, without an event."""
    return any(
        c.get("type") == "ScalingActive" and c.get("reason") == AWAITING
        for c in status.get("conditions") or ()
    )


def _mirrored(autoscaler: Body) -> Decided:
    """What an autoscaler says of itself."""
    conditions = (autoscaler.get("status") or {}).get("conditions") or ()
    told = {c.get("type"): c for c in conditions}
    for kind in ("AbleToScale", "ScalingActive"):
        if (failed := told.get(kind) or {}).get("status") == "False":
            return _refused(str(failed.get("reason")), reports.printable(failed.get("message")))
    if (told.get("ScalingActive") or {}).get("status") == "True":
        return "True", "ValidMetricFound", "The number of pods follows the metrics."
    return "Unknown", "Pending", "The autoscaler has not looked at the metrics yet."


def _refused(reason: str, detail: str) -> Decided:
    if reason == "AmbiguousSelector":
        return _conflict(detail)
    if reason.startswith(_NO_METRICS) and reason != "FailedGetScale":
        return "False", "MetricsUnavailable", reasons.message("MetricsUnavailable", detail)
    known = reason if _REASON.fullmatch(reason) else "AutoscalerFailed"
    return "False", known, detail or "The autoscaler gives no message."


def _graced(decided: Decided, observed: Observed, ready: int, now: datetime) -> Decided:
    """There is nothing to measure before a pod is ready, and for a moment afterwards nothing is measured."""
    if decided[1] != "MetricsUnavailable":
        return decided
    if not ready:
        return "Unknown", "NoReadyReplica", "Only ready pods are measured, and there are none."
    before = {c.get("type"): c for c in observed.status.get("conditions") or ()}
    available = before.get("Available") or {}
    since = str(available.get("lastTransitionTime", "")) if available.get("status") == "True" else ""
    if seconds_since(since, now) < METRICS_GRACE_SECONDS:
        return "Unknown", AWAITING, "The first pod has just become ready; its metrics are awaited."
    return decided


def _conflict(detail: str) -> Decided:
    return "False", "ConflictingAutoscaler", reasons.message("ConflictingAutoscaler", detail)


def _title(autoscaler: Body) -> str:
    """The autoscaler's name, and what made it: people know their ScaledObject and not the HPA behind it."""
    metadata = autoscaler["metadata"]
    made_by = [
        f" of {owner.get('kind')} {owner.get('name')}"
        for owner in metadata.get("ownerReferences") or ()
        if owner.get("controller")
    ]
    return f"HorizontalPodAutoscaler {metadata['name']}{''.join(made_by[:1])}"
