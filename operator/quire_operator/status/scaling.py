"""The condition ScalingActive and status.scaling: whether the number of pods follows the load.

Mirrors the conditions of the HorizontalPodAutoscaler (ours, or the one that KEDA created for our
ScaledObject), and reports a second autoscaler of the same Deployment. Pure; decides about no pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from quire_operator import names, quantity, reports
from quire_operator.errors import QuantityError
from quire_operator.observed import Body, Observed, seconds_since
from quire_operator.resources import PodMeasurements
from quire_operator.spec import LLMDeployment
from quire_operator.status import reasons
from quire_operator.status.reasons import ConditionValue

# A pod that has just become ready is scraped within seconds, and the autoscaler syncs every 15.
METRICS_GRACE_SECONDS = 60.0
AWAITING = "AwaitingMetrics"
AWAITING_KEDA = "AwaitingKEDA"
_POLLED_REASONS = (AWAITING, AWAITING_KEDA, "KEDAMissing")  # they change without a watched event
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_NO_METRICS = ("FailedGet", "FailedConvert", "InvalidMetric")


def condition(
    model: LLMDeployment, observed: Observed, *, ready: int, now: datetime, has_adapter: bool = True
) -> ConditionValue | None:
    """ScalingActive; None where the spec gives the number and there is no autoscaler. `ready`: number of
    pods. `has_adapter`: whether Quire's metrics adapter is installed.
    """
    if model.replicas == 0:
        is_meant = model.spec.autoscaling is not None
        return ("False", "Suspended", "No pods run: spec.suspend is true.") if is_meant else None
    foreign_autoscalers, who = observed.foreign_autoscalers, model.autoscaler
    if len(foreign_autoscalers) > (who == "External"):
        return _conflict(", ".join(sorted(_title(rival) for rival in foreign_autoscalers)))
    if not who:
        return None
    if who == "KEDA":
        return _with_grace(_keda(observed), observed, ready, now)
    if is_idle(model, observed):
        return "True", "Idle", "There are no requests, and no pod runs until the next one."
    own = foreign_autoscalers[0] if foreign_autoscalers else observed.child("HorizontalPodAutoscaler")
    if own is None and who == "External":
        return (
            "Unknown",
            "External",
            "The Deployment has no HorizontalPodAutoscaler; something else has to scale it.",
        )
    mirrored = _mirrored(own or {})
    if model.scales_to_zero and mirrored[1] == "ScalingDisabled":
        return "Unknown", "Pending", "Pods are started; the autoscaler has not seen that yet."
    if who == "HPA" and not has_adapter and mirrored[1] in ("MetricsUnavailable", "Pending"):
        # Another adapter may serve the same API: the autoscaler has the last word.
        status = "False" if mirrored[1] == "MetricsUnavailable" else "Unknown"
        return status, "MetricsAdapterMissing", reasons.message("MetricsAdapterMissing")
    return _with_grace(mirrored, observed, ready, now)


def worst(of_roles: Sequence[ConditionValue | None]) -> ConditionValue | None:
    """The condition of all roles: the first that is False, else Unknown, else True."""
    known = [one for one in of_roles if one is not None]
    return min(known, key=lambda one: ("False", "Unknown", "True").index(one[0]), default=None)


def summary(model: LLMDeployment, observed: Observed) -> dict[str, Any]:
    """status.scaling; empty where the spec gives the number."""
    if not model.autoscaler:
        return {}
    live = {
        "HPA": observed.child("HorizontalPodAutoscaler"),
        "KEDA": observed.keda_autoscaler,
        "External": next(iter(observed.foreign_autoscalers), None),
    }[model.autoscaler]
    live_status = (live or {}).get("status") or {}
    known = {
        "autoscaler": live["metadata"]["name"] if live else None,
        "desiredReplicas": live_status.get("desiredReplicas"),
        "lastScaleTime": live_status.get("lastScaleTime"),
    }
    return {"backend": model.autoscaler} | {key: value for key, value in known.items() if value is not None}


def pod_measurements(body: Body, autoscaler: Body | None) -> PodMeasurements:
    """Measurements of the running pods, from the LLMDeployment's status and the live autoscaler: ours, or the
    one that KEDA created for our ScaledObject.
    """
    seconds = ((body.get("status") or {}).get("model") or {}).get("lastLoadSeconds")
    live = autoscaler or {}
    scale_down = ((live.get("spec") or {}).get("behavior") or {}).get("scaleDown") or {}
    return PodMeasurements(
        load_seconds=seconds if isinstance(seconds, int) else None,
        gpu_percent=_gpu_percent(live),
        scale_down_disabled=scale_down.get("selectPolicy") == "Disabled",
    )


def _gpu_percent(autoscaler: Body) -> float | None:
    """The mean over the replicas, as the autoscaler last read it."""
    for metric in (autoscaler.get("status") or {}).get("currentMetrics") or ():
        source = metric.get("object") or metric.get("external") or {}
        # KEDA prefixes the metric's name with the index and type of the trigger.
        if str((source.get("metric") or {}).get("name")).endswith(names.METRICS["GPUUtilization"]):
            try:
                return float(quantity.parse(str((source.get("current") or {}).get("averageValue")))) * 100
            except QuantityError:
                return None
    return None


def is_idle(model: LLMDeployment, observed: Observed) -> bool:
    """Whether no pod runs for lack of requests."""
    scaling = model.spec.autoscaling
    if not model.autoscaler or scaling is None or scaling.idle is None:
        return False
    return ((observed.workload or {}).get("spec") or {}).get("replicas") == 0


def activator(model: LLMDeployment, *, has_gateway: bool) -> ConditionValue | None:
    """ActivatorReady: whether something holds the first request while no pod runs. None without scale to
    zero.
    """
    scaling = model.spec.autoscaling
    if not model.autoscaler or scaling is None or scaling.idle is None:
        return None
    if model.scales_to_zero and has_gateway:
        return "True", "GatewayInstalled", "The gateway holds requests while no pod runs."
    if model.scales_to_zero:
        return "False", "GatewayMissing", reasons.message("GatewayMissing")
    if scaling.idle.activator is None:
        return "False", "ActivatorMissing", reasons.message("ActivatorMissing")
    return (
        "True",
        "ActivatorGiven",
        f"{scaling.idle.activator.scaler_address} notifies KEDA of the first request.",
    )


def awaits_metrics(status: Mapping[str, Any]) -> bool:
    """Whether ScalingActive will change with time, without an event."""
    return any(
        c.get("type") == "ScalingActive" and c.get("reason") in _POLLED_REASONS
        for c in status.get("conditions") or ()
    )


def _keda(observed: Observed) -> ConditionValue:
    """The condition of our ScaledObject where it fails, else that of KEDA's HorizontalPodAutoscaler."""
    if "ScaledObject" in observed.missing:
        return "False", "KEDAMissing", reasons.message("KEDAMissing")
    conditions = ((observed.child("ScaledObject") or {}).get("status") or {}).get("conditions") or ()
    by_type = {c.get("type"): c for c in conditions}
    for kind, bad in (("Paused", "True"), ("Fallback", "True"), ("Ready", "False")):
        condition = by_type.get(kind) or {}
        if condition.get("status") == bad and (kind != "Ready" or observed.keda_autoscaler is None):
            detail = reports.printable(condition.get("message"))
            if kind == "Fallback":
                return "False", "MetricsUnavailable", reasons.message("MetricsUnavailable", detail)
            return _refused(str(condition.get("reason")), detail)
    if observed.keda_autoscaler is None:
        return "Unknown", AWAITING_KEDA, "KEDA has not taken up the ScaledObject: its operator has to run."
    if ((observed.workload or {}).get("spec") or {}).get("replicas") == 0:
        return "True", "Idle", "There are no requests, and KEDA has scaled to zero."
    return _mirrored(observed.keda_autoscaler)


def _mirrored(autoscaler: Body) -> ConditionValue:
    """The autoscaler's own condition."""
    conditions = (autoscaler.get("status") or {}).get("conditions") or ()
    by_type = {c.get("type"): c for c in conditions}
    for kind in ("AbleToScale", "ScalingActive"):
        if (failed := by_type.get(kind) or {}).get("status") == "False":
            return _refused(str(failed.get("reason")), reports.printable(failed.get("message")))
    if (by_type.get("ScalingActive") or {}).get("status") == "True":
        return "True", "ValidMetricFound", "The number of pods follows the metrics."
    return "Unknown", "Pending", "The autoscaler has not looked at the metrics yet."


def _refused(reason: str, detail: str) -> ConditionValue:
    if reason == "AmbiguousSelector":
        return _conflict(detail)
    if reason.startswith(_NO_METRICS) and reason != "FailedGetScale":
        return "False", "MetricsUnavailable", reasons.message("MetricsUnavailable", detail)
    known = reason if _REASON.fullmatch(reason) else "AutoscalerFailed"
    return "False", known, detail or "The autoscaler gives no message."


def _with_grace(decided: ConditionValue, observed: Observed, ready: int, now: datetime) -> ConditionValue:
    """Missing metrics are no failure before a pod is ready, nor for a moment afterwards."""
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


def _conflict(detail: str) -> ConditionValue:
    return "False", "ConflictingAutoscaler", reasons.message("ConflictingAutoscaler", detail)


def _title(autoscaler: Body) -> str:
    """The autoscaler's name and its owner: users know their ScaledObject and not the HPA behind it."""
    metadata = autoscaler["metadata"]
    made_by = [
        f" of {owner.get('kind')} {owner.get('name')}"
        for owner in metadata.get("ownerReferences") or ()
        if owner.get("controller")
    ]
    return f"HorizontalPodAutoscaler {metadata['name']}{''.join(made_by[:1])}"
