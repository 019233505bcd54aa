"""The condition ModelCached: whether the shared claim holds the model, and why it does not.

The Job's conditions decide; its pods report the progress and how they ended. A failure is reported until the
next attempt starts to download, so that a failure that repeats causes no new Event. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from quire_operator import names, reports
from quire_operator.observed import (
    Body,
    Observed,
    Ref,
    controller_uid,
    ended,
    seconds_since,
    served_model,
)
from quire_operator.spec import LLMDeployment
from quire_operator.status import pods, reasons, rollout
from quire_operator.status.pods import Failure, PodState
from quire_operator.status.reasons import STALLED_AFTER_FAILURES, ConditionValue

_FAILED = "ModelDownloadFailed"
# The Job controller creates its pod at once unless that is refused; the reason is only in an Event of the
# Job.
JOB_GRACE_SECONDS = 5.0
_UNDER_WAY = ("downloading", "done")


@dataclass(frozen=True, kw_only=True)
class DownloadState:
    """`awaited`: pods of the newest spec are not created before it completes. `states`: of the Job's pods."""

    cached: bool
    awaited: bool
    states: tuple[PodState, ...] = ()
    failure: Failure | None = None
    condition: ConditionValue = ("Unknown", "Pending", "")

    @property
    def downloading(self) -> bool:
        """Whether a pod of the Job is running."""
        return any(state.loading for state in self.states)


def awaits_pods(job: Body, download_pods: Sequence[Body], now: datetime) -> bool:
    """True when a Job that has not ended has had no pod for so long that one may have been refused."""
    age = seconds_since(str(job["metadata"].get("creationTimestamp", "")), now)
    has_pods = any(controller_uid(pod) == job["metadata"]["uid"] for pod in download_pods)
    return not (has_pods or ended(job)) and age >= JOB_GRACE_SECONDS


def read(model: LLMDeployment, observed: Observed, now: datetime) -> DownloadState | None:
    """None where the pods share no claim."""
    cache = model.spec.cache
    if cache is None or not cache.is_shared:
        return None
    job = _job(model, observed)
    cached = job is not None and "Complete" in ended(job)
    serves = served_model(observed.workload or {})
    uid = "" if job is None else str(job["metadata"]["uid"])
    states = tuple(_state(pod, observed, now) for pod in observed.download_pods if controller_uid(pod) == uid)
    failure = None if cached else _failure(model, job, states, _previous_failure(model, observed))
    if failure is None and observed.job_error and not (cached or states):
        failure = rollout.creation_failure(reports.printable(observed.job_error))
    download = DownloadState(
        cached=cached,
        awaited=not cached and serves != (model.claim_name, names.model_path(model.model_dir)),
        states=states,
        failure=failure,
    )
    return replace(download, condition=_condition(model, download))


def pods_with_corrupt_model(observed: Observed, now: datetime) -> dict[str, str]:
    """By name, when each pod that does not serve for that reason found its model corrupt."""
    found = {}
    for pod in observed.pods:
        state = pods.read(pod, newest="", sample=None, now=now, stored_failure={})
        if state.failure is not None and state.failure is state.ended and _is_corrupt(state.failure):
            found[state.name] = state.failure.time
    return found


def _is_corrupt(failure: Failure) -> bool:
    return failure.reason == "ModelCorrupt" and failure.container == names.CONTAINER


def _job(model: LLMDeployment, observed: Observed) -> Body | None:
    """The Job of this model, else any: that of the revision that was rolled back to."""
    jobs = {target: body for target, body in observed.children.items() if target.kind == "Job"}
    return jobs.get(Ref("Job", model.download_name)) or next(iter(jobs.values()), None)


def _state(pod: Body, observed: Observed, now: datetime) -> PodState:
    uid = str(pod["metadata"]["uid"])
    error = observed.mount_errors.get(uid, "")
    sample = observed.samples.get(uid)
    state = pods.read(pod, newest="", sample=sample, now=now, stored_failure={}, mount_error=error)
    end = state.ended
    if end is not None and end.reason not in reasons.BY_EXIT_CODE.values():
        end = replace(end, reason=_FAILED, detail=end.reason)
    elif end is not None and end.exit_code is not None and end.exit_code not in reasons.BY_EXIT_CODE:
        end = replace(end, reason=_FAILED)  # killed; it has no engine that could crash
    # It has no probes, so Kubernetes reports it as ready as soon as it runs.
    return replace(state, ready=False, loading=state.downloading and not state.terminating, ended=end)


def _failure(
    model: LLMDeployment, job: Body | None, states: tuple[PodState, ...], previous: Failure | None
) -> Failure | None:
    failed = ended(job or {}).get("Failed")
    ends = [state.ended for state in states if state.ended is not None]
    last = max(ends, key=lambda failure: failure.time, default=None)
    if failed is not None and failed.get("reason") == "DeadlineExceeded":
        limit = model.spec.cache.download.timeout_seconds if model.spec.cache is not None else 0
        return Failure(reason=_FAILED, detail=f"not done after spec.cache.download.timeoutSeconds, {limit} s")
    if failed is not None:
        unknown = Failure(reason=_FAILED, detail=reports.printable(failed.get("message")))
        return replace(last or unknown, count=STALLED_AFTER_FAILURES)
    now = [state for state in states if not state.terminating]
    if any(state.sample is not None and state.sample.phase in _UNDER_WAY for state in now if state.loading):
        return None
    waits = next((state.failure for state in now if state.failure is not None), None)
    return waits or (replace(last, count=len(ends)) if last is not None else previous)


def _previous_failure(model: LLMDeployment, observed: Observed) -> Failure | None:
    """Why the previous Job failed, if that was for the same spec."""
    stored: Mapping[str, str | int] = next(
        (c for c in observed.status.get("conditions") or () if c.get("type") == "ModelCached"), {}
    )
    reason = str(stored.get("reason"))
    if stored.get("status") != "False" or stored.get("observedGeneration") != model.generation:
        return None
    code = reasons.REASONS[reason].exit_code if reason in reasons.REASONS else None
    if code is None:
        return None
    detail = reasons.detail(reason, str(stored.get("message")))
    count = STALLED_AFTER_FAILURES
    return Failure(reason=reason, detail=detail, exit_code=code, count=count, container=names.FETCHER)


def _condition(model: LLMDeployment, download: DownloadState) -> ConditionValue:
    if download.cached:
        return "True", "Cached", f"The claim {model.claim_name} holds the model."
    failure = download.failure
    if failure is not None:
        return "False", failure.reason, reasons.message(failure.reason, failure.detail)
    if download.downloading:
        said = {state.sample.phase for state in download.states if state.loading and state.sample}
        reason = "Verifying" if said == {"verifying"} else "Downloading"
        return "False", reason, "A Job brings the model; status.model says how far that is."
    return "False", "Pending", f"The Job {model.download_name} is about to bring the model."
