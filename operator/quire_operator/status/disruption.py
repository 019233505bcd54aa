"""Detects pods that Kubernetes disrupts although nothing is wrong with them: evicted, preempted, on a lost
node.

Pure. Reads only what Kubernetes' controllers and the kubelet write to the pod, because the operator has no
right to read nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator import reports
from quire_operator.observed import Body

#: Reported as an Event even when another pod has replaced the disrupted one already and nothing is degraded.
REASONS = frozenset({"Evicted", "NodeLost", "Preempted"})

# The condition DisruptionTarget; all its other reasons are evictions.
_BY_CONDITION = {"PreemptionByScheduler": "Preempted", "DeletionByPodGC": "NodeLost"}
# status.reason of a pod that the kubelet, or formerly the node's controller, ended; all others are evictions.
_BY_STATUS = {"NodeLost": "NodeLost", "Preempting": "Preempted"}


@dataclass(frozen=True, kw_only=True)
class PodDisruption:
    """`time`: since when, as the API server writes it."""

    reason: str
    detail: str
    time: str


def read(pod: Body, conditions: Mapping[str, Mapping[str, Any]]) -> PodDisruption | None:
    """The pod's disruption; None where there is none."""
    status, target = pod.get("status") or {}, conditions.get("DisruptionTarget") or {}
    ready = conditions.get("Ready") or {}
    if _is_silent(conditions):
        node = reports.printable((pod.get("spec") or {}).get("nodeName"))
        return PodDisruption(reason="NodeLost", detail=f"node {node}", time=_time(ready))
    if target.get("status") == "True":
        reason = _BY_CONDITION.get(str(target.get("reason")), "Evicted")
        detail = reports.printable(target.get("message")) or reports.printable(target.get("reason"))
        return PodDisruption(reason=reason, detail=detail, time=_time(target))
    if status.get("phase") == "Failed" and status.get("reason"):
        texts = [reports.printable(status.get(key)) for key in ("reason", "message")]
        since = str(status.get("startTime") or pod["metadata"].get("creationTimestamp") or "")
        reason = _BY_STATUS.get(str(status["reason"]), "Evicted")
        return PodDisruption(reason=reason, detail=": ".join(filter(None, texts)), time=since)
    return None


def _is_silent(conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the node controller set Ready to False because the node is unreachable: the kubelet would have
    changed ContainersReady first, and a readiness gate gives a reason.
    """
    ready, containers = conditions.get("Ready") or {}, conditions.get("ContainersReady") or {}
    statuses = (ready.get("status"), containers.get("status"))
    return statuses == ("False", "True") and not ready.get("reason")


def _time(condition: Mapping[str, Any]) -> str:
    return str(condition.get("lastTransitionTime") or "")
