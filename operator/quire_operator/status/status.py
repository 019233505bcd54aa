"""Computes the status of an LLMDeployment from what was observed: conditions, numbers, progress, last
failure.

The stored status is read only to keep what cannot be observed again: times, the last failure, the last
measured load time (which sets the autoscaler's behavior). It never decides about pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import Body, Observed, newest_revision
from quire_operator.spec import LLMDeployment
from quire_operator.status import (
    accelerator_fit,
    adapters,
    authentication,
    conditions,
    disaggregation,
    effective,
    golden_tokens,
    groups,
    model_cache,
    pods,
    progress,
    reasons,
    rollout,
    routing,
    scaling,
    sharing,
    spot,
)
from quire_operator.status.accelerator_fit import RequestedAccelerator
from quire_operator.status.conditions import Facts, RolloutState
from quire_operator.status.groups import GroupState
from quire_operator.status.model_cache import DownloadState
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import ConditionValue
from quire_operator.status.sharing import TurnState

Status = dict[str, Any]
_UNSPECIFIED = RequestedAccelerator()

# Phases in which nothing has failed: a pod waits for what others provide.
_WAITING_PHASES = {reason: reason for reason in ("WaitingForGPU", "WaitingForNode")}
_WAITING_PHASES |= dict.fromkeys(
    ("GroupIncomplete", "VolumePending", "QuotaExceeded", "WaitingForQuota"), "Pending"
)


@dataclass(frozen=True, kw_only=True)
class _Assessment:
    """What is worked out first, and all parts of the status follow from."""

    rollout: RolloutState
    states: Sequence[PodState]
    failure: Failure | None
    workers: Sequence[PodState] = ()
    groups: Sequence[GroupState] = ()
    refused: Failure | None = None  # why pods cannot be created
    prefill: _Assessment | None = None  # of the prefill pods
    download: DownloadState | None = None

    @property
    def here(self) -> Sequence[PodState]:
        """The pods that stay."""
        return [state for state in self.states if not state.terminating]

    @property
    def by_role(self) -> dict[str, _Assessment]:
        """This and that of the prefill pods, where there are any."""
        other = {} if self.prefill is None else {names.ROLE_PREFILL: self.prefill}
        return {names.ROLE_LEADER: self, **other}

    @property
    def download_pods(self) -> Sequence[PodState]:
        """The pods of the download Job."""
        return () if self.download is None else self.download.states


def compute_status(
    model: LLMDeployment,
    observed: Observed,
    *,
    now: datetime,
    problem: Failure | None = None,
    available_revision: str = "",
    accelerator: RequestedAccelerator = _UNSPECIFIED,
    has_metrics_adapter: bool = True,
    has_gateway: bool = False,
    turn: TurnState | None = None,
) -> Status:
    """The whole status. `problem`: why the desired state could not be applied. `available_revision`: the
    revision that this release would render for the same spec, where it is another one than the applied.
    `has_metrics_adapter`: Quire's own, which feeds autoscalers. `has_gateway`: one that asks its pods.
    `turn`: of a model that shares an accelerator.
    """
    assessment = _assess(model, observed, now)
    old, here, deployment = observed.status, assessment.here, observed.workload or {}
    known, downloads = old.get("model") or {}, model.spec.cache is not None
    loading = progress.model([*here, *assessment.download_pods], known, downloads=downloads)
    sizes = accelerator_fit.sizes(model, here, known)
    engine = effective.summary(here, old.get("engine") or {})
    adapted = adapters.summary(model, here, old.get("adapters") or ())
    facts = _facts(
        model,
        observed,
        assessment,
        now=now,
        problem=problem,
        fits=accelerator_fit.condition(model, accelerator, sizes, loading),
        drain_fits=spot.condition(model, accelerator, deployment),
        engine=engine,
        adapted=adapters.condition(model, adapted),
        has_metrics_adapter=has_metrics_adapter,
        has_gateway=has_gateway,
        turn=turn,
    )
    built = conditions.build(
        facts, generation=model.generation, old=old.get("conditions") or (), now=timestamp(now)
    )
    status: Status = {
        "observedGeneration": model.generation,
        "phase": _phase(facts, {c["type"]: c["status"] for c in built}),
        "url": model.url,
        "servedName": model.served_names[0],
        "selector": names.selector(model.name),
        **_numbers(assessment.rollout, facts.loading, observed.in_role(names.ROLE_LEADER).pods),
        **({"groups": groups.summary(assessment.groups)} if assessment.groups else {}),
        "scaling": scaling.summary(model, observed),
        "sharing": sharing.summary(turn, old.get("sharing") or {}),
        "roles": disaggregation.summary({k: one.rollout for k, one in assessment.by_role.items()}),
        "model": loading | ({"sizes": sizes} if sizes else {}),
        "adapters": adapted,
        "engine": progress.engine(deployment, here, old.get("engine") or {}) | engine,
        **rollout.summary(deployment, available_revision),
        "lastFailure": _last_failure(problem, assessment, old.get("lastFailure") or {}, now),
        "conditions": built,
    }
    return {key: value for key, value in status.items() if value not in ({}, [])}


def _numbers(rollout: RolloutState, loading: int, pods: Iterable[Body]) -> Status:
    return {
        "replicas": rollout.replicas,
        "desiredReplicas": rollout.wanted,
        "readyReplicas": rollout.ready,
        "updatedReplicas": rollout.updated,
        "availableReplicas": rollout.available,
        "loadingReplicas": loading,
        "drainingReplicas": sum("deletionTimestamp" in pod["metadata"] for pod in pods),
    }


def changes_without_event(status: Mapping[str, Any]) -> bool:
    """Whether something in the status may change without an event, so that the LLMDeployment has to be
    polled.
    """
    return scaling.awaits_metrics(status) or routing.awaits_gateway(status) or _awaits_node(status)


def _awaits_node(status: Mapping[str, Any]) -> bool:
    """Whether a pod has no node, which becomes a failure with time."""
    return any(
        c["type"] == "Scheduled" and c["reason"] == conditions.AWAITING_NODE for c in status["conditions"]
    )


def is_ready(status: Mapping[str, Any]) -> bool | None:
    """What the condition Ready says; None where no pods are wanted."""
    if status.get("phase") in ("Suspended", "Idle"):
        return None
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])


def has_failing_pods(model: LLMDeployment, observed: Observed, *, now: datetime) -> bool:
    """Whether pods fail or cannot be created."""
    return _assess(model, observed, now).failure is not None


def rollout_failure(model: LLMDeployment, observed: Observed, *, now: datetime) -> str:
    """Why the current rollout cannot complete; empty while it may. Pods of an older template are no
    evidence.
    """
    deployment = observed.workload
    if deployment is None or not rollout.is_seen(deployment):
        return ""
    if not model.is_grouped and not rollout.is_newest(observed.replica_sets, deployment):
        return ""
    assessment = _assess(model, observed, now)
    final = rollout.final_failure(assessment.states)
    if final is None and not assessment.rollout.deadline_exceeded:
        return ""
    reasons = ["ProgressDeadlineExceeded"] if final is None else []
    failure = final or assessment.failure
    explained = [failure.reason, failure.detail] if failure is not None else []
    return reports.printable(": ".join([*reasons, *explained]))


def compute_refused_status(observed: Observed, problem: Failure, *, now: datetime) -> Status:
    """The status of an LLMDeployment that cannot be rendered: its pods go on serving, and the numbers are
    kept.
    """
    generation = int(observed.body["metadata"].get("generation") or 0)
    deployment = observed.workload
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
    assessment = _Assessment(rollout=facts.rollout, states=(), failure=None)
    failure = _last_failure(problem, assessment, old.get("lastFailure") or {}, now)
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


def _facts(
    model: LLMDeployment,
    observed: Observed,
    assessment: _Assessment,
    *,
    now: datetime,
    problem: Failure | None,
    fits: ConditionValue | None,
    drain_fits: ConditionValue | None,
    engine: Mapping[str, Any],
    adapted: ConditionValue | None,
    has_metrics_adapter: bool,
    has_gateway: bool,
    turn: TurnState | None,
) -> Facts:
    """What the conditions follow from. `engine`: status.engine; `adapted`: AdaptersReady."""
    here, prefill = assessment.here, assessment.prefill
    workers = [state for state in assessment.workers if not state.terminating]
    of_prefill = () if prefill is None else prefill.here
    unplaced = [
        state
        for states in ([*here, *workers], of_prefill)
        for state in pods.by_relevance(states)
        if not state.scheduled
    ]
    refused = assessment.refused or (None if prefill is None else prefill.refused)
    asleep = sharing.not_ready(turn, observed)
    return Facts(
        rollout=assessment.rollout,
        suspended=model.replicas == 0,
        idle=scaling.is_idle(model, observed) or asleep is not None,
        asleep=asleep,
        loading=sum(state.loading for state in here),
        downloading=sum(state.loading and state.downloading for state in here),
        pods=len(here) + len(workers) + len(of_prefill),
        unscheduled=next((s.failure for s in unplaced if s.failure), refused),
        unplaced=len(unplaced),
        failure=assessment.failure,
        problem=problem,
        scaling=_scaling(model, observed, assessment, now=now, has_metrics_adapter=has_metrics_adapter),
        activator=(
            scaling.activator(model, has_gateway=has_gateway)
            if turn is None
            else sharing.activator(turn, has_gateway=has_gateway)
        ),
        fits=fits,
        drain_fits=drain_fits,
        download=assessment.download,
        routed=routing.condition(model, observed),
        authenticated=authentication.of_ranks(model),
        transfers_authenticated=authentication.of_transfers(model),
        context=effective.condition(model, engine),
        adapted=adapted,
        too_small=effective.too_small(model, here, engine) if assessment.rollout.seen else None,
        prefill=None if prefill is None else prefill.rollout,
        prefill_failure=None if prefill is None else prefill.failure,
        transfers=None if prefill is None else disaggregation.condition(here, prefill.rollout),
    )


def _scaling(
    model: LLMDeployment,
    observed: Observed,
    assessment: _Assessment,
    *,
    now: datetime,
    has_metrics_adapter: bool,
) -> ConditionValue | None:
    """ScalingActive of all roles: the worst."""
    return scaling.worst(
        [
            scaling.condition(
                role,
                observed.in_role(role.role),
                ready=assessment.by_role[role.role].rollout.ready,
                now=now,
                has_adapter=has_metrics_adapter,
            )
            for role in model.roles
        ]
    )


def _assess(model: LLMDeployment, observed: Observed, now: datetime) -> _Assessment:
    """Of the pods that clients talk to, with that of the prefill pods."""
    serving = _assess_role(model, observed.in_role(model.role), now)
    if model.prefill is None:
        return serving
    return replace(serving, prefill=_assess_role(model.prefill, observed.in_role(names.ROLE_PREFILL), now))


def _assess_role(model: LLMDeployment, observed: Observed, now: datetime) -> _Assessment:
    deployment = observed.workload
    newest = newest_revision(observed)
    wanted, needed = rollout.numbers(model, observed)
    known = {c.get("reason") for c in observed.status.get("conditions") or () if c.get("type") == "Degraded"}
    last = observed.status.get("lastFailure") or {}
    stored = last if last.get("reason") in known else {}
    states = [
        pods.read(
            pod,
            newest=newest,
            sample=observed.samples.get(str(pod["metadata"]["uid"])),
            stored_failure=stored,
            mount_error=observed.mount_errors.get(str(pod["metadata"]["uid"]), ""),
            now=now,
        )
        for pod in (*observed.pods, *observed.workers)
    ]
    states, workers = states[: len(observed.pods)], states[len(observed.pods) :]
    states = golden_tokens.with_disagreements(states, observed, stored)
    waiting = rollout.waiting_to_surge(model, observed, now)
    failures = [
        s.failure
        for s in pods.by_relevance([*states, *workers])
        if s.failure is not None and s.name not in waiting
    ]
    refused = rollout.pod_creation_failure(deployment)
    refused_surge = rollout.refused_surge(model, observed, now)
    download = model_cache.read(model, observed, now)
    failures = _with_download(failures, download)
    # A failure that is reported already is kept, so that the status does not alternate between two failing
    # pods.
    unable = None if refused_surge else refused
    failure = next((f for f in failures if f.reason in known), failures[0] if failures else unable)
    found = groups.read(model, observed, [*states, *workers], now)
    failure = groups.failure(found, now) or failure
    counted = _rollout(deployment, wanted=wanted, needed=needed, sets=observed.replica_sets)
    numbers = replace(
        counted,
        seen=counted.seen and not (download is not None and download.awaited),
        surge_blocked=next(iter(waiting.values()), refused_surge),
        surge_wait_seconds=model.spec.rollout.surge_wait_seconds,
        in_place=rollout.has_fallen_back_to_in_place(model, deployment),
    )
    return _Assessment(
        rollout=numbers,
        states=states,
        workers=workers,
        groups=found,
        failure=failure,
        refused=refused,
        download=download,
    )


def _with_download(failures: list[Failure], download: DownloadState | None) -> list[Failure]:
    """The Job's failure comes first where pods wait for it. A corrupt model is not final while the Job
    repairs it.
    """
    if download is None or download.cached:
        return failures
    failures = [replace(one, count=1) if one.reason == "ModelCorrupt" else one for one in failures]
    own = [download.failure] if download.failure is not None else []
    return [*own, *failures] if download.awaited else [*failures, *own]


def _rollout(deployment: Body | None, *, wanted: int, needed: int, sets: Sequence[Body] = ()) -> RolloutState:
    if deployment is None:
        return RolloutState(wanted=wanted, needed=needed)
    status = deployment.get("status") or {}
    reported = {c["type"]: c for c in status.get("conditions") or ()}
    progressing = reported.get("Progressing") or {}
    return RolloutState(
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
    """One word for the printer column; clients should rely on the conditions."""
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
        return "Downloading" if facts.download.downloading else "Pending"
    if facts.loading:
        return "Downloading" if facts.downloading == facts.loading else "Loading"
    return "Pending"


def _last_failure(
    problem: Failure | None, assessment: _Assessment, old: Mapping[str, Any], now: datetime
) -> Mapping[str, Any]:
    if problem is not None:
        return _describe(problem, old, timestamp(now))
    roles = assessment.by_role.values()
    states = [state for one in roles for state in (*one.states, *one.workers)]
    failure = next((one.failure for one in roles if one.failure is not None), None)
    return _newest_failure([*states, *assessment.download_pods], failure, old, timestamp(now))


def _newest_failure(
    states: Sequence[PodState], failure: Failure | None, old: Mapping[str, Any], now: str
) -> Mapping[str, Any]:
    """`failure`: the current one that explains most, None where nothing fails. `old`: as stored."""
    ended = [state.ended for state in states if state.ended is not None]
    last = max(ended, key=lambda failure: failure.time, default=None)
    chosen = failure if failure is not None and failure.exit_code is None else last
    if chosen is None or (chosen is last and chosen.time < str(old.get("time", ""))):
        return old
    return _describe(chosen, old, now)


def _describe(failure: Failure, old: Mapping[str, Any], now: str) -> dict[str, Any]:
    """As the status has it; the time of an unchanged failure is kept."""
    same = old.get("reason") == failure.reason and old.get("pod", "") == failure.pod
    result = {
        "reason": failure.reason,
        "message": reasons.message(failure.reason, failure.detail),
        "time": failure.time or (same and old.get("time")) or now,
    }
    if failure.pod:
        result |= {"pod": failure.pod, "container": failure.container}
    if failure.exit_code is not None:
        result["exitCode"] = failure.exit_code
    return result
