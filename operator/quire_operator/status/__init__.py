"""The status of an LLMDeployment, computed from what was observed: conditions, numbers, progress, last
failure.

Called by reconcile, which writes the result in one patch when it differs from what is stored. The stored
status is only read to keep what cannot be observed again: times, the last failure, the last measured load
(which an autoscaler's pace follows). Never to decide about pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import Body, Observed, newest_of
from quire_operator.spec import LLMDeployment
from quire_operator.status import (
    conditions,
    fitting,
    last_failure,
    model_cache,
    pods,
    progress,
    reasons,
    rollout,
    routing,
    scaling,
)
from quire_operator.status.conditions import Facts, Rollout
from quire_operator.status.fitting import Target
from quire_operator.status.hindrance import missing_rights, ownership_conflict
from quire_operator.status.model_cache import Download, found_corrupt
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.scaling import measured

__all__ = [
    "Failure",
    "Status",
    "Target",
    "awaits_others",
    "failed_rollout",
    "found_corrupt",
    "is_failing",
    "is_ready",
    "measured",
    "missing_rights",
    "of",
    "ownership_conflict",
    "refused",
    "timestamp",
]

Status = dict[str, Any]
NO_PROFILE = Target()

# Nothing has failed yet while a pod waits for what others provide.
_WAITING_PHASES = {reason: reason for reason in ("WaitingForGPU", "WaitingForNode")}
_WAITING_PHASES |= dict.fromkeys(("VolumePending", "QuotaExceeded", "WaitingForQuota"), "Pending")


@dataclass(frozen=True, kw_only=True)
class _View:
    """What `of` works out first and all parts of the status follow from."""

    rollout: Rollout
    states: Sequence[PodState]
    failure: Failure | None
    download: Download | None = None

    @property
    def fetchers(self) -> Sequence[PodState]:
        """The pods of the Job that brings the model."""
        return () if self.download is None else self.download.states


def of(
    model: LLMDeployment,
    observed: Observed,
    *,
    now: datetime,
    problem: Failure | None = None,
    newer: str = "",
    target: Target = NO_PROFILE,
) -> Status:
    """The whole status. `problem`: why the desired state could not be applied, if so. `newer`: what would be
    rendered for the same spec now, if that is something else. `target`: the accelerator that is asked for.
    """
    view = _view(model, observed, now)
    old = observed.status
    here = [state for state in view.states if not state.going]
    known, downloads = old.get("model") or {}, model.spec.cache is not None
    told = progress.model([*here, *view.fetchers], known, downloads=downloads)
    sizes = fitting.sizes(model, here, known)
    facts = Facts(
        rollout=view.rollout,
        suspended=model.replicas == 0,
        idle=scaling.is_idle(model, observed),
        loading=sum(state.loading for state in here),
        fetching=sum(state.loading and state.fetching for state in here),
        pods=len(here),
        unscheduled=next((s.failure for s in here if not s.scheduled and s.failure), None),
        failure=view.failure,
        problem=problem,
        scaling=scaling.condition(model, observed, ready=view.rollout.ready, now=now),
        activator=scaling.activator(model),
        fits=fitting.condition(model, target, sizes, told),
        download=view.download,
        routed=routing.condition(model, observed),
    )
    built = conditions.build(
        facts, generation=model.generation, old=old.get("conditions") or (), now=timestamp(now)
    )
    deployment = observed.child("Deployment") or {}
    status: Status = {
        "observedGeneration": model.generation,
        "phase": _phase(facts, {c["type"]: c["status"] for c in built}),
        "url": model.url,
        "selector": names.selector(model.name),
        "replicas": view.rollout.replicas,
        "readyReplicas": view.rollout.ready,
        "updatedReplicas": view.rollout.updated,
        "availableReplicas": view.rollout.available,
        "loadingReplicas": facts.loading,
        "scaling": scaling.summary(model, observed),
        "drainingReplicas": sum("deletionTimestamp" in pod["metadata"] for pod in observed.pods),
        "model": told | ({"sizes": sizes} if sizes else {}),
        "engine": progress.engine(deployment, here, old.get("engine") or {}),
        **rollout.summary(deployment, newer),
        "lastFailure": _last_failure(problem, view, old.get("lastFailure") or {}, now),
        "conditions": built,
    }
    return {key: value for key, value in status.items() if value != {}}


def awaits_others(status: Mapping[str, Any]) -> bool:
    """Whether something in the status will change with time, without an event."""
    return scaling.awaits_metrics(status) or routing.awaits_others(status)


def is_ready(status: Mapping[str, Any]) -> bool | None:
    """What the condition Ready says; None where no pods are wanted."""
    if status.get("phase") in ("Suspended", "Idle"):
        return None
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])


def is_failing(model: LLMDeployment, observed: Observed, *, now: datetime) -> bool:
    """Whether pods fail, or cannot be made."""
    return _view(model, observed, now).failure is not None


def failed_rollout(model: LLMDeployment, observed: Observed, *, now: datetime) -> str:
    """Why the rollout that is under way will not end by itself; empty while it may. What was said of the pods
    of another template is no evidence.
    """
    deployment = observed.child("Deployment")
    if deployment is None or not (
        rollout.is_seen(deployment) and rollout.is_newest(observed.replica_sets, deployment)
    ):
        return ""
    view = _view(model, observed, now)
    final = rollout.final_failure(view.states)
    if final is None and not view.rollout.deadline_exceeded:
        return ""
    reasons = ["ProgressDeadlineExceeded"] if final is None else []
    failure = final or view.failure
    told = [failure.reason, failure.detail] if failure is not None else []
    return reports.printable(": ".join([*reasons, *told]))


def refused(observed: Observed, problem: Failure, *, now: datetime) -> Status:
    """The status of an object of which nothing can be rendered: what serves goes on serving, numbers stay."""
    generation = int(observed.body["metadata"].get("generation") or 0)
    deployment = observed.child("Deployment")
    facts = Facts(
        rollout=_rollout(deployment, wanted=0, needed=1),
        suspended=False,
        loading=0,
        pods=len(observed.pods),
        unscheduled=None,
        failure=None,
        problem=problem,
    )
    old = observed.status
    before = old.get("conditions") or ()
    built = conditions.build(facts, generation=generation, old=before, now=timestamp(now))
    view = _View(rollout=facts.rollout, states=(), failure=None)
    failure = _last_failure(problem, view, old.get("lastFailure") or {}, now)
    return {
        **old,
        "observedGeneration": generation,
        "phase": "Failed" if reasons.REASONS[problem.reason].final else "Pending",
        "lastFailure": failure,
        "conditions": built,
    }


def timestamp(moment: datetime) -> str:
    """As the API server writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _view(model: LLMDeployment, observed: Observed, now: datetime) -> _View:
    deployment = observed.child("Deployment")
    newest = newest_of(observed.replica_sets)
    newest_uid = "" if newest is None else str(newest["metadata"]["uid"])
    wanted, needed = rollout.numbers(model, observed)
    known = {c.get("reason") for c in observed.status.get("conditions") or () if c.get("type") == "Degraded"}
    told = observed.status.get("lastFailure") or {}
    states = [
        pods.read(
            pod,
            newest=newest_uid,
            sample=observed.samples.get(str(pod["metadata"]["uid"])),
            told=told if told.get("reason") in known else {},
            mount_error=observed.mount_errors.get(str(pod["metadata"]["uid"]), ""),
            now=now,
        )
        for pod in observed.pods
    ]
    waiting = rollout.waiting_to_surge(model, observed, now)
    failures = [s.failure for s in pods.by_weight(states) if s.failure is not None and s.name not in waiting]
    refused = rollout.refused(deployment)
    download = model_cache.read(model, observed, now)
    failures = _with_download(failures, download)
    # The one that is told already stays the one that is told, so that two bad pods do not take turns.
    failure = next((f for f in failures if f.reason in known), failures[0] if failures else refused)
    told_of = _rollout(deployment, wanted=wanted, needed=needed, sets=observed.replica_sets)
    numbers = replace(
        told_of,
        seen=told_of.seen and not (download is not None and download.awaited),
        awaits_room=next(iter(waiting.values()), ""),
        surge_wait_seconds=model.spec.rollout.surge_wait_seconds,
        in_place=rollout.has_given_up_to_surge(model, deployment),
    )
    return _View(rollout=numbers, states=states, failure=failure, download=download)


def _with_download(failures: list[Failure], download: Download | None) -> list[Failure]:
    """The Job's failure comes first where pods wait for it; while it mends the model, that is not final."""
    if download is None or download.cached:
        return failures
    failures = [replace(one, count=1) if one.reason == "ModelCorrupt" else one for one in failures]
    own = [download.failure] if download.failure is not None else []
    return [*own, *failures] if download.awaited else [*failures, *own]


def _rollout(deployment: Body | None, *, wanted: int, needed: int, sets: Sequence[Body] = ()) -> Rollout:
    if deployment is None:
        return Rollout(wanted=wanted, needed=needed)
    status = deployment.get("status") or {}
    reported = {c["type"]: c for c in status.get("conditions") or ()}
    progressing = reported.get("Progressing") or {}
    return Rollout(
        wanted=wanted,
        needed=needed,
        replicas=int(status.get("replicas") or 0),
        updated=int(status.get("updatedReplicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        available=int(status.get("availableReplicas") or 0),
        seen=rollout.is_seen(deployment) or rollout.is_rolled_out(sets, deployment),
        deadline_exceeded=progressing.get("reason") == "ProgressDeadlineExceeded",
        paused=bool((deployment.get("spec") or {}).get("paused")),
    )


def _phase(facts: Facts, is_true: Mapping[str, str]) -> str:
    """One word for the printer column; the conditions are the contract."""
    if is_true["Stalled"] == "True":
        return "Failed"
    if facts.suspended:
        return "Suspended"
    if facts.idle:
        return "Idle"
    if facts.failure is not None and not facts.rollout.ready and facts.failure.reason in _WAITING_PHASES:
        return _WAITING_PHASES[facts.failure.reason]
    if is_true["Degraded"] == "True":
        return "Degraded"
    if is_true["Ready"] == "True":
        return "Serving"
    if is_true["Available"] == "True":
        return "Updating"
    if facts.download is not None and facts.download.awaited:
        return "Downloading" if facts.download.fetching else "Pending"
    if facts.loading:
        return "Downloading" if facts.fetching == facts.loading else "Loading"
    return "Pending"


def _last_failure(
    problem: Failure | None, view: _View, old: Mapping[str, Any], now: datetime
) -> Mapping[str, Any]:
    if problem is not None:
        return last_failure.told(problem, old, timestamp(now))
    return last_failure.newest([*view.states, *view.fetchers], view.failure, old, timestamp(now))
