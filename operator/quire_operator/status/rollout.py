"""The state of a rollout: the Deployment's numbers, the strategy in effect, failures to create pods.

Pure; decides about no pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from quire_operator import names, quota, reports
from quire_operator.observed import (
    Body,
    Observed,
    is_replaced_in_place,
    lacks_resources_since,
    newest_replica_set,
    old_pods,
    replica_failure,
    scheduler_message,
    seconds_since,
    surge_pods,
)
from quire_operator.spec import LLMDeployment
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import REASONS, STALLED_AFTER_FAILURES

# From the end of an old pod until the scheduler retries the pending one.
_RETRY_GRACE_SECONDS = 30
_POD_REFUSED = re.compile(r'^(Error creating: )?pods "[^"]*" is forbidden: ')


def waiting_to_surge(model: LLMDeployment, observed: Observed, now: datetime) -> dict[str, str]:
    """The unschedulable surge pods, with the scheduler's message. That is no failure where strategy Auto
    falls back to in-place replacement.
    """
    if model.spec.rollout.strategy != "Auto" or not model.spec.rollout.max_surge:
        return {}
    pods = surge_pods(observed) or (observed.pods if _may_have_freed_resources(model, observed, now) else ())
    return {
        str(pod["metadata"]["name"]): reports.printable(scheduler_message(pod))
        for pod in pods
        if lacks_resources_since(pod)
    }


def refused_surge(model: LLMDeployment, observed: Observed, now: datetime) -> str:
    """Why a quota refuses the surge pod, where strategy Auto falls back to in-place replacement: then that is
    no failure either. Empty otherwise.
    """
    if model.spec.rollout.strategy != "Auto" or not model.spec.rollout.max_surge:
        return ""
    failure = quota.refused_surge(observed)
    if not old_pods(observed) and _may_have_freed_resources(model, observed, now):
        failure = replica_failure(observed.workload)
    message = _POD_REFUSED.sub("", reports.printable(failure.get("message")))
    return message if quota.is_exceeded(message) else ""


def _may_have_freed_resources(model: LLMDeployment, observed: Observed, now: datetime) -> bool:
    """Whether the last old pod may have ended a moment ago, by the time of the Deployment's last
    scale-down.
    """
    status = (observed.workload or {}).get("status") or {}
    reported = {c["type"]: c for c in status.get("conditions") or ()}
    progressing = reported.get("Progressing") or {}
    if progressing.get("reason") != "ReplicaSetUpdated" or len(observed.replica_sets) < 2:
        return False
    grace = model.spec.drain.pre_stop_seconds + model.drain_timeout_seconds + _RETRY_GRACE_SECONDS
    return seconds_since(str(progressing.get("lastUpdateTime", "")), now) < grace


def summary(deployment: Body, available_revision: str) -> dict[str, Any]:
    """status.rollout and the revisions; empty before there is a Deployment."""
    if not deployment:
        return {}
    annotations = (deployment.get("metadata") or {}).get("annotations") or {}
    summary: dict[str, Any] = {"rollout": {"strategyInEffect": _strategy(deployment)}}
    if revision := annotations.get(names.ANNOTATION_RENDER_REVISION):
        summary["renderRevision"] = str(revision)
    return summary | ({"availableRenderRevision": available_revision} if available_revision else {})


def has_fallen_back_to_in_place(model: LLMDeployment, deployment: Body | None) -> bool:
    """Whether Auto has switched to in-place replacement."""
    rollout = model.spec.rollout
    is_auto = rollout.strategy == "Auto" and rollout.max_surge > 0
    return is_auto and deployment is not None and is_replaced_in_place(deployment)


def is_seen(deployment: Body) -> bool:
    """Whether the Deployment controller has observed the newest spec."""
    seen = int((deployment.get("status") or {}).get("observedGeneration") or 0)
    return seen >= int(deployment["metadata"].get("generation") or 0)


def is_rolled_out(sets: Sequence[Body], deployment: Body) -> bool:
    """Whether all pods are of the newest template: then only the number has changed, and what was reported
    still holds.
    """
    newest = newest_replica_set(sets)
    old = [one for one in sets if one is not newest and (one.get("status") or {}).get("replicas")]
    return not old and is_newest(sets, deployment)


def is_newest(sets: Sequence[Body], deployment: Body) -> bool:
    """Whether the newest ReplicaSet has the Deployment's pod template."""
    wanted = (deployment.get("spec") or {}).get("template")
    made = ((newest_replica_set(sets) or {}).get("spec") or {}).get("template")
    if not wanted or not made:
        return False
    metadata = made.get("metadata") or {}
    labels = {k: v for k, v in (metadata.get("labels") or {}).items() if k != "pod-template-hash"}
    return bool({**made, "metadata": {**metadata, "labels": labels}} == wanted)


def pod_creation_failure(deployment: Body | None) -> Failure | None:
    """The refusal of pods that the ReplicaSet tries to create."""
    condition = replica_failure(deployment)
    if not condition:
        return None
    since = str(condition.get("lastTransitionTime") or "")
    return creation_failure(reports.printable(condition.get("message")), since)


def creation_failure(message: str, since: str = "") -> Failure:
    """The API server's refusal of a pod that a controller tries to create."""
    detail = _POD_REFUSED.sub("", message)
    reason = "QuotaExceeded" if quota.is_exceeded(detail) else "ApplyRejected"
    return Failure(reason=reason, detail=detail, time=since)


def final_failure(states: Sequence[PodState]) -> Failure | None:
    """The repeated failure of a pod of the newest revision that no retry will fix."""
    failures = [state.failure for state in states if state.current and state.failure is not None]
    return next((failure for failure in failures if is_final(failure)), None)


def is_final(failure: Failure) -> bool:
    """Whether no retry helps until the spec or the model changes."""
    is_an_end = failure.exit_code is not None or failure.reason == "GroupCrashLoop"
    is_repeated = is_an_end and failure.count >= STALLED_AFTER_FAILURES
    return REASONS[failure.reason].final and is_repeated


def _strategy(deployment: Mapping[str, Any]) -> str:
    strategy = (deployment.get("spec") or {}).get("strategy") or {}
    if strategy.get("type") == "Recreate":
        return "Recreate"
    return "InPlace" if is_replaced_in_place(deployment) else "Surge"


def numbers(model: LLMDeployment, observed: Observed) -> tuple[int, int]:
    """How many pods are wanted now, and how many must be ready for the LLMDeployment to be Ready. Those that
    an autoscaler adds are wanted but not needed.
    """
    wanted, spare = model.replicas, model.spec.disruption.max_unavailable
    if not wanted:
        return 0, 0
    if model.spec.sharing is not None:
        live = int(((observed.workload or {}).get("spec") or {}).get("replicas", wanted))
        return live, live
    if not model.autoscaler and not observed.foreign_autoscalers:
        return wanted, max(1, wanted - spare)
    live = int(((observed.workload or {}).get("spec") or {}).get("replicas", wanted))
    return live, wanted if model.autoscaler else max(1, min(live, wanted) - spare)
