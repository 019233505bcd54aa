"""How a rollout goes: the Deployment's numbers, what its strategy came to, which revision serves.

Called by `status.of` and by reconcile. Pure; decides about no pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import (
    Body,
    Observed,
    awaits_room_since,
    is_replaced_in_place,
    newest_of,
    scheduler_says,
    seconds_since,
    surging_pods,
)
from quire_operator.spec import LLMDeployment
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import REASONS, STALLED_AFTER_FAILURES

# After an old pod is gone, until the scheduler has tried again.
_ROOM_GRACE_SECONDS = 30
_POD_REFUSED = re.compile(r'^(Error creating: )?pods "[^"]*" is forbidden: ')


def waiting_to_surge(model: LLMDeployment, observed: Observed, now: datetime) -> dict[str, str]:
    """The additional pods that find no room and what the scheduler says of them, where Auto will not wait for
    ever: that is no failure.
    """
    if model.spec.rollout.strategy != "Auto" or not model.spec.rollout.max_surge:
        return {}
    pods = surging_pods(observed) or (observed.pods if _has_left_room(model, observed, now) else ())
    return {
        str(pod["metadata"]["name"]): reports.printable(scheduler_says(pod))
        for pod in pods
        if awaits_room_since(pod)
    }


def _has_left_room(model: LLMDeployment, observed: Observed, now: datetime) -> bool:
    """Whether the last old pod may have gone a moment ago: the Deployment says when it was told to."""
    status = (observed.child("Deployment") or {}).get("status") or {}
    reported = {c["type"]: c for c in status.get("conditions") or ()}
    progressing = reported.get("Progressing") or {}
    if progressing.get("reason") != "ReplicaSetUpdated" or len(observed.replica_sets) < 2:
        return False
    drain = model.spec.drain
    grace = drain.pre_stop_seconds + drain.timeout_seconds + _ROOM_GRACE_SECONDS
    return seconds_since(str(progressing.get("lastUpdateTime", "")), now) < grace


def summary(deployment: Body, newer: str) -> dict[str, Any]:
    """status.rollout and the revisions; empty before there is a Deployment."""
    if not deployment:
        return {}
    annotations = (deployment.get("metadata") or {}).get("annotations") or {}
    told: dict[str, Any] = {"rollout": {"strategyInEffect": _strategy(deployment)}}
    if revision := annotations.get(names.ANNOTATION_RENDER_REVISION):
        told["renderRevision"] = str(revision)
    return told | ({"availableRenderRevision": newer} if newer else {})


def has_given_up_to_surge(model: LLMDeployment, deployment: Body | None) -> bool:
    """Whether Auto goes on in place."""
    rollout = model.spec.rollout
    is_auto = rollout.strategy == "Auto" and rollout.max_surge > 0
    return is_auto and deployment is not None and is_replaced_in_place(deployment)


def is_seen(deployment: Body) -> bool:
    """Whether the Deployment's controller has seen its newest spec."""
    seen = int((deployment.get("status") or {}).get("observedGeneration") or 0)
    return seen >= int(deployment["metadata"].get("generation") or 0)


def is_rolled_out(sets: Sequence[Body], deployment: Body) -> bool:
    """Whether all pods are made as the Deployment wants them: then an autoscaler has changed their number,
    and what is reported of the old one still holds.
    """
    newest = newest_of(sets)
    old = [one for one in sets if one is not newest and (one.get("status") or {}).get("replicas")]
    return not old and is_newest(sets, deployment)


def is_newest(sets: Sequence[Body], deployment: Body) -> bool:
    """Whether the newest pods are made as the Deployment wants them."""
    wanted = (deployment.get("spec") or {}).get("template")
    made = ((newest_of(sets) or {}).get("spec") or {}).get("template")
    if not wanted or not made:
        return False
    metadata = made.get("metadata") or {}
    labels = {k: v for k, v in (metadata.get("labels") or {}).items() if k != "pod-template-hash"}
    return bool({**made, "metadata": {**metadata, "labels": labels}} == wanted)


def refused(deployment: Body | None) -> Failure | None:
    """The pods that the API server does not let the ReplicaSet create."""
    for condition in ((deployment or {}).get("status") or {}).get("conditions") or ():
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            since = str(condition.get("lastTransitionTime") or "")
            return refusal(reports.printable(condition.get("message")), since)
    return None


def refusal(told: str, since: str = "") -> Failure:
    """What the API server says of a pod that it does not let a controller create."""
    detail = _POD_REFUSED.sub("", told)
    reason = "QuotaExceeded" if "exceeded quota" in detail else "ApplyRejected"
    return Failure(reason=reason, detail=detail, time=since)


def final_failure(states: Sequence[PodState]) -> Failure | None:
    """Of a pod of the newest revision: the same end again, which no retry will help."""
    failures = [state.failure for state in states if state.current and state.failure is not None]
    return next((failure for failure in failures if is_final(failure)), None)


def is_final(failure: Failure) -> bool:
    """Whether no retry helps until something changes."""
    is_repeated = failure.exit_code is not None and failure.count >= STALLED_AFTER_FAILURES
    return REASONS[failure.reason].final and is_repeated


def _strategy(deployment: Mapping[str, Any]) -> str:
    strategy = (deployment.get("spec") or {}).get("strategy") or {}
    if strategy.get("type") == "Recreate":
        return "Recreate"
    return "InPlace" if is_replaced_in_place(deployment) else "Surge"


def numbers(model: LLMDeployment, observed: Observed) -> tuple[int, int]:
    """How many pods are wanted now, and without how many ready ones the LLMDeployment is not Ready. Those
    that an autoscaler adds are wanted and not needed.
    """
    wanted, spare = model.replicas, model.spec.disruption.max_unavailable
    if not wanted:
        return 0, 0
    if not model.autoscaler and not observed.rivals:
        return wanted, max(1, wanted - spare)
    live = int(((observed.child("Deployment") or {}).get("spec") or {}).get("replicas", wanted))
    return live, wanted if model.autoscaler else max(1, min(live, wanted) - spare)
