"""The state of one pod: ready, loading, failing or terminating, and for which reason.

Pure: a live pod and its last /statusz in, a frozen PodState out. What a pod reports about itself is used only
where Kubernetes cannot know better, and never for another object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import (
    SCHEDULING_GRACE_SECONDS,
    Body,
    are_held_by_pods,
    is_gated_by_kueue,
    revision_of,
    scheduler_message,
    scheduling_gates,
    seconds_since,
    unscheduled_since,
)
from quire_operator.reports import Fetched, Sample
from quire_operator.status import disruption, reasons
from quire_operator.status.reasons import BY_EXIT_CODE, REASONS

# A claim or a Secret that is created just after its pod is mounted at the kubelet's next try.
VOLUME_GRACE_SECONDS = 30.0

_VOLUME_WORDS = re.compile(r"persistentvolumeclaim|volume", re.IGNORECASE)
_NOT_DEVICES = frozenset({"cpu", "memory", "ephemeral-storage"})

_IMAGE_WAITS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CONFIG_WAITS = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_SELF_REPORTED = frozenset({"CanaryMismatch", "CanaryStale", "EngineStalled", "ProcessStalled"})
_STARTING = frozenset({"loading", "warming"})
_SELF_TERMINATED = frozenset(
    {
        "ModelNotFound",
        "ModelCorrupt",
        "ModelAccessDenied",
        "ModelDownloadFailed",
        "OutOfDisk",
        "ConfigError",
        "StartupTimeout",
        "LoadStalled",
        "GPUOutOfMemory",
        "EngineCrashed",
        "EngineStalled",
        "ProcessStalled",
        "CanaryMismatch",
        "MixedRevision",
    }
)
# The kubelet alternates between the error and a back-off that quotes it. Both are reduced to the same text.
_PULL_PREFIX = re.compile(r'^(Back-off pulling image "[^"]*"(: )?)?(ErrImagePull: )?')


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a pod (or, without `pod`, the LLMDeployment) does not serve."""

    reason: str
    detail: str = ""
    pod: str = ""
    exit_code: int | None = None
    time: str = ""  # empty where Kubernetes gives none; the status then has the time it was first seen
    count: int = 1  # how often this pod has failed
    container: str = names.CONTAINER


@dataclass(frozen=True, kw_only=True)
class PodState:
    """`current`: of the newest revision. `failure`: the current one; `ended`: how its container ended
    last.
    """

    name: str
    current: bool
    ready: bool
    terminating: bool
    scheduled: bool
    loading: bool
    failure: Failure | None
    ended: Failure | None
    sample: Sample | None
    created: str
    downloading: bool = False
    fetched: Fetched | None = None


def awaits_volumes(pod: Body, now: datetime) -> bool:
    """True when a scheduled pod has had no sandbox for so long that a volume may be the cause.

    The kubelet's FailedMount Event is the proof: the pod looks the same while its image is pulled.
    """
    conditions = _conditions(pod)
    scheduled = conditions.get("PodScheduled") or {}
    return (
        scheduled.get("status") == "True"
        and (conditions.get("PodReadyToStartContainers") or {}).get("status") == "False"
        and "deletionTimestamp" not in pod["metadata"]
        and seconds_since(str(scheduled.get("lastTransitionTime", "")), now) >= VOLUME_GRACE_SECONDS
    )


def read(
    pod: Body,
    *,
    newest: str,
    sample: Sample | None,
    now: datetime,
    stored_failure: Mapping[str, Any],
    mount_error: str = "",
) -> PodState:
    """`newest`: the newest revision; `sample`: the pod's last /statusz, if there is one;
    `stored_failure`: the stored lastFailure, where it still holds.
    """
    status = pod.get("status") or {}
    conditions = _conditions(pod)
    container = _server(status)
    terminating = _is_terminating(pod)
    ready = not terminating and (conditions.get("Ready") or {}).get("status") == "True"
    ended = _disrupted(pod, conditions) or _ended(pod, container)
    is_disrupted = ended is not None and ended.reason in disruption.REASONS
    said = None if sample is None else _self_reported(sample, pod)
    if sample is None or sample.phase in _STARTING:
        said = said or _self_reported_before(stored_failure, pod, container)
    failure = ended if is_disrupted else _failure(pod, conditions, container, said, ended, now)
    failure = None if ready or terminating else failure
    if failure is None and mount_error and awaits_volumes(pod, now):
        detail = reports.printable(mount_error)
        failure = Failure(reason="VolumePending", detail=detail, pod=pod["metadata"]["name"])
    running = "running" in (container.get("state") or {})
    return PodState(
        name=pod["metadata"]["name"],
        current=revision_of(pod) == newest,
        ready=ready,
        terminating=terminating,
        scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        loading=running
        and not (ready or terminating or is_disrupted)
        and (failure is None or failure is ended),
        failure=failure,
        ended=ended,
        sample=sample,
        created=str(pod["metadata"].get("creationTimestamp", "")),
        downloading=running and container.get("name") == names.FETCHER,
        fetched=_fetched(status),
    )


def _fetched(status: Mapping[str, Any]) -> Fetched | None:
    fetcher = named(status, "initContainerStatuses", names.FETCHER)
    fetcher = fetcher or named(status, "containerStatuses", names.FETCHER)
    end = (fetcher.get("state") or {}).get("terminated") or {}
    return reports.parse_fetched(end.get("message")) if end.get("exitCode") == 0 else None


def _is_terminating(pod: Body) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return "deletionTimestamp" in pod["metadata"] or phase in ("Failed", "Succeeded")


def _conditions(pod: Body) -> dict[str, Mapping[str, Any]]:
    return {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or ()}


def _server(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the server's container or, until it completes, of the download container; of a download
    pod, the latter.
    """
    fetcher = named(status, "initContainerStatuses", names.FETCHER)
    if fetcher and ((fetcher.get("state") or {}).get("terminated") or {}).get("exitCode") != 0:
        return fetcher
    server = named(status, "containerStatuses", names.CONTAINER)
    return server or named(status, "containerStatuses", names.FETCHER)


def named(status: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    """The kubelet's status of a container; empty where there is none yet."""
    return next((dict(one) for one in status.get(kind) or () if one.get("name") == name), {})


def _failure(
    pod: Body,
    conditions: Mapping[str, Any],
    container: Mapping[str, Any],
    said: Failure | None,
    ended: Failure | None,
    now: datetime,
) -> Failure | None:
    """The most specific reason: what the engine reports, how it ended, what its container waits for."""
    name = pod["metadata"]["name"]
    running = (container.get("state") or {}).get("running")
    if running is not None:
        if said is not None:
            return said
        return ended if ended is not None and not _served_since(running, conditions) else None
    if ended is not None:
        return ended
    waiting = (container.get("state") or {}).get("waiting") or {}
    waits_for = str(waiting.get("reason", ""))
    detail = reports.printable(waiting.get("message"))
    if waits_for in _IMAGE_WAITS:
        image = reports.printable(container.get("image") or _image(pod))
        cause = _PULL_PREFIX.sub("", detail) or "the pull failed"
        return Failure(reason="ImagePullFailed", detail=f"{image}: {cause}", pod=name)
    if waits_for in _CONFIG_WAITS:
        return Failure(reason="ConfigError", detail=detail or waits_for, pod=name)
    waits = _why_unscheduled(pod, now)
    return None if waits is None else Failure(reason=waits[0], detail=waits[1], pod=name)


def _why_unscheduled(pod: Body, now: datetime) -> tuple[str, str] | None:
    """What a pod without a node waits for (an accelerator, quota, a volume or any node): reason and detail.
    None for a pod that has a node, or has waited for a moment only.
    """
    since = unscheduled_since(pod)
    if not since or seconds_since(since, now) < SCHEDULING_GRACE_SECONDS:
        return None
    gates = ", ".join(reports.printable(gate) for gate in scheduling_gates(pod))
    if is_gated_by_kueue(pod):
        return "WaitingForQuota", f"scheduling gate {gates}"
    if gates:
        return "WaitingForNode", f"held back by the scheduling gate {gates}"
    detail = reports.printable(scheduler_message(pod))
    if _VOLUME_WORDS.search(detail):
        return "VolumePending", detail
    lacks = [device for device in sorted(_devices(pod)) if f"Insufficient {device}" in detail]
    if not lacks:
        return "WaitingForNode", detail
    device = reports.printable(lacks[0])
    why = {
        True: f"all {device} are in use: ",
        False: f"no node that may take the pod has {device}: ",
        None: "",
    }[are_held_by_pods(scheduler_message(pod))]
    return "WaitingForGPU", f"{why}{detail}"


def _devices(pod: Body) -> set[str]:
    containers = (pod.get("spec") or {}).get("containers") or ()
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return {str(name) for each in limits for name in each} - _NOT_DEVICES


def _self_reported(sample: Sample, pod: Body) -> Failure | None:
    """What the server says of itself, with the processes that do not run and the ranks that hold it up."""
    reason = sample.reason if sample.reason in _SELF_REPORTED else ""
    if not reason and sample.phase == "stalled":
        reason = "EngineStalled"
    pod_name = str(pod["metadata"]["name"])
    detail = "; ".join(filter(None, (_not_running(sample), _slowest_rank(sample, pod_name))))
    return Failure(reason=reason, detail=detail, pod=pod_name) if reason else None


def _not_running(sample: Sample) -> str:
    """But for ranks, of which `_slowest_rank` says more where the server does."""
    names = [name for name in sample.silent if not (sample.ranks and name.startswith("rank "))]
    return f"not running: {', '.join(names)}" if names else ""


def _slowest_rank(sample: Sample, pod_name: str) -> str:
    """Empty where all ranks are alike. Names the pod of a rank that runs in another one."""
    slowest = reports.slowest_rank(sample.ranks)
    if slowest is None:
        return ""
    newest = max(one.last_step for one in sample.ranks)
    where = f" in pod {slowest.host}" if slowest.host not in ("", pod_name) else ""
    if not slowest.missing and slowest.last_step == newest:
        return f"rank {slowest.rank}{where} is slow: {slowest.step_micros / 1e6:.3g} s for a step"
    why = f"{slowest.missing}, " if slowest.missing else ""
    return f"rank {slowest.rank}{where} is behind: {why}step {slowest.last_step} of {newest}"


def _self_reported_before(
    stored_failure: Mapping[str, Any], pod: Body, container: Mapping[str, Any]
) -> Failure | None:
    """What the running container reported before the operator was restarted, or before the container ended
    where the kubelet has not reported that yet.
    """
    started = str(((container.get("state") or {}).get("running") or {}).get("startedAt"))
    if stored_failure.get("pod") != pod["metadata"]["name"] or str(stored_failure.get("time")) < started:
        return None
    reason = str(stored_failure["reason"])
    if reason not in _SELF_REPORTED:
        return None
    detail = reasons.detail(reason, str(stored_failure.get("message", "")))
    return Failure(reason=reason, detail=detail, pod=pod["metadata"]["name"])


def _served_since(running: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """True when the pod became unready after this container was ready: then the last termination is not the
    reason.
    """
    changed = str((conditions.get("Ready") or {}).get("lastTransitionTime", ""))
    return bool(changed) and changed > str(running.get("startedAt", ""))


def _disrupted(pod: Body, conditions: Mapping[str, Any]) -> Failure | None:
    """A disruption of the pod as a Failure. It explains how the container ended, not the other way round."""
    found = disruption.read(pod, conditions)
    if found is None:
        return None
    return Failure(reason=found.reason, detail=found.detail, time=found.time, pod=pod["metadata"]["name"])


def _ended(pod: Body, container: Mapping[str, Any]) -> Failure | None:
    """How the container ended last, unless it ended with success in a terminating pod."""
    state = container.get("state") or {}
    end = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if not end or (end.get("exitCode") == 0 and _is_terminating(pod)):
        return None
    code = int(end.get("exitCode", 1))
    said = reports.parse_termination(end.get("message"))
    detail = said.message
    if end.get("reason") == "OOMKilled":
        reason = "OOMKilled"
    elif said.reason in _SELF_TERMINATED:
        reason = said.reason
    else:
        reason = BY_EXIT_CODE.get(code, "EngineCrashed")
        detail = detail or f"exit code {code}"
    return Failure(
        reason=reason,
        detail=detail,
        pod=pod["metadata"]["name"],
        exit_code=code,
        container=str(container.get("name") or names.CONTAINER),
        time=str(end.get("finishedAt") or ""),
        count=int(container.get("restartCount", 0)) + (0 if "running" in state else 1),
    )


def _image(pod: Body) -> str:
    return str(next((c.get("image") for c in pod["spec"].get("containers") or ()), ""))


assert REASONS.keys() >= _SELF_REPORTED | _SELF_TERMINATED  # every reason has a remedy


def by_relevance(states: Sequence[PodState]) -> list[PodState]:
    """Pods of the newest revision first; among them, those whose container ended before those that wait."""
    return sorted(
        states, key=lambda s: (not s.current, s.failure is None or s.failure.exit_code is None, s.name)
    )
