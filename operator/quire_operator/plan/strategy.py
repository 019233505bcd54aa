"""How pods are replaced just now: what `rollout.strategy: Auto` comes to.

Called by reconcile. Auto surges first. When the additional pod finds no room for long enough, the rest of
this rollout goes in place, one pod at a time: each finds the room that an old one leaves. Which of the two is
in effect stands in the Deployment itself, so that a restarted operator goes on. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from quire_operator.observed import (
    Body,
    Observed,
    awaits_room_since,
    is_replaced_in_place,
    seconds_since,
    surging_pods,
)
from quire_operator.resources import Manifest
from quire_operator.spec import LLMDeployment


def settled(
    desired: Iterable[Manifest], model: LLMDeployment, observed: Observed, now: datetime
) -> tuple[Manifest, ...]:
    """`desired` with the Deployment's strategy that is in effect."""
    if not goes_in_place(model, observed, now):
        return tuple(desired)
    in_place = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return tuple(
        {**manifest, "spec": {**manifest["spec"], "strategy": in_place}}
        if manifest["kind"] == "Deployment"
        else manifest
        for manifest in desired
    )


def goes_in_place(model: LLMDeployment, observed: Observed, now: datetime) -> bool:
    """Whether Auto has given up to surge in the rollout that is under way. Once it has, it does not return to
    it before the last old pod is gone.
    """
    rollout, deployment = model.spec.rollout, observed.child("Deployment")
    if rollout.strategy != "Auto" or not rollout.max_surge or deployment is None:
        return False
    if is_replaced_in_place(deployment):
        return not _is_replaced(deployment)
    waits = [seconds_since(awaits_room_since(pod), now) for pod in surging_pods(observed)]
    return max(waits, default=0.0) >= rollout.surge_wait_seconds


def _is_replaced(deployment: Body) -> bool:
    """Whether every pod is of the newest template."""
    status = deployment.get("status") or {}
    seen = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    return seen and int(status.get("updatedReplicas") or 0) == int(status.get("replicas") or 0)
