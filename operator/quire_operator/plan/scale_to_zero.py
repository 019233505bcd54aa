"""When all pods of a model stop for lack of requests, and when they start again, without KEDA.

Pods say when they had their last request, through a gateway or not. While none runs a gateway holds the
requests and says so in a Lease. Pure.
"""

from __future__ import annotations

from datetime import datetime

from quire_operator.observed import Observed, has_ended, is_ready
from quire_operator.reports import STALE_SECONDS
from quire_operator.spec import LLMDeployment

#: A gateway renews its Lease every 10 s while requests wait.
DEMAND_SECONDS = 30.0


def is_idle(model: LLMDeployment, observed: Observed, now: datetime, *, has_gateway: bool) -> bool:
    """Whether no pod is to run. Without a gateway nothing would start one again, so then one always does."""
    if not (model.scales_to_zero and has_gateway) or observed.workload is None:
        return False
    if now.timestamp() - observed.demanded_at < DEMAND_SECONDS:
        return False
    if (observed.workload.get("spec") or {}).get("replicas") == 0:
        return True
    left = _seconds_left(model, observed, now)
    return left is not None and left <= 0


def idles_in(model: LLMDeployment, observed: Observed, now: datetime, *, has_gateway: bool) -> float | None:
    """Seconds until `is_idle` may change without an event; None where it does not."""
    if not (model.scales_to_zero and has_gateway):
        return None
    left = _seconds_left(model, observed, now)
    if left is None:
        return None
    due = max(left, DEMAND_SECONDS - (now.timestamp() - observed.demanded_at))
    return due if due > 0 else None


def _seconds_left(model: LLMDeployment, observed: Observed, now: datetime) -> float | None:
    """Until the time without requests is over; None while there are requests, or it is not known of each pod
    that it has none: one that loads was started for some, and an old answer says nothing of the present.
    """
    scaling = model.spec.autoscaling
    assert scaling is not None and scaling.idle is not None
    pods = [pod for pod in observed.pods if "deletionTimestamp" not in pod["metadata"] and not has_ended(pod)]
    since = observed.demanded_at
    for pod in pods:
        sample = observed.samples.get(str(pod["metadata"]["uid"]))
        if not is_ready(pod) or sample is None or sample.quiet_since is None:
            return None
        if now.timestamp() - sample.asked_at > STALE_SECONDS:
            return None
        since = max(since, sample.quiet_since)
    return since + scaling.idle.after_seconds - now.timestamp() if pods else None
