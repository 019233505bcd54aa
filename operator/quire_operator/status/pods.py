"""One pod as the status sees it: ready, loading, failing or going, and for which reason.

Pure: a live pod and what it says of itself in, a frozen PodState out. Called by `status.of`. What a pod
says is believed only where Kubernetes cannot know better, and never about another object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quire_operator import names, reports
from quire_operator.observed import Body, controller_uid, seconds_since
from quire_operator.reports import Fetched, Sample
from quire_operator.status import disruption, placement
from quire_operator.status.reasons import BY_EXIT_CODE, REASONS

# A claim or a Secret that comes a moment after its pod is mounted at the kubelet's next try.
VOLUME_GRACE_SECONDS = 30.0

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
_SELF_REPORTED = frozenset({"CanaryMismatch", "CanaryStale", "EngineStalled"})
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
    }
)
# The kubelet alternates between the error and a back-off that quotes it: the same text for both.
_PULL_PREFIX = re.compile(r'^(Back-off pulling image "[^"]*"(: )?)?(ErrImagePull: )?')


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a pod (or, without `pod`, the whole LLMDeployment) does not serve."""

    reason: str
    detail: str = ""
    pod: str = ""
    exit_code: int | None = None
    time: str = ""  # empty when Kubernetes gives none: then the time at which we first saw it
    count: int = 1  # how often this pod has failed
    container: str = names.CONTAINER


@dataclass(frozen=True, kw_only=True)
class PodState:
    """`current`: made by the newest revision. `failure` is of now, `ended` the last end of its container."""

    name: str
    current: bool
    ready: bool
    going: bool
    scheduled: bool
    loading: bool
    failure: Failure | None
    ended: Failure | None
    sample: Sample | None
    created: str
    fetching: bool = False
    fetched: Fetched | None = None


def awaits_volumes(pod: Body, now: datetime) -> bool:
    """True when a scheduled pod has no sandbox for so long that a volume may be the cause.

    Only may: the kubelet reports the same while it pulls the image. Its FailedMount Event is the evidence.
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
    told: Mapping[str, Any],
    mount_error: str = "",
) -> PodState:
    """`newest`: uid of the newest ReplicaSet; `sample`: the pod's last /statusz, if there is one; `told`: the
    stored lastFailure that still holds.
    """
    status = pod.get("status") or {}
    conditions = _conditions(pod)
    container = _server(status)
    going = _is_going(pod)
    ready = not going and (conditions.get("Ready") or {}).get("status") == "True"
    ended = _disrupted(pod, conditions) or _ended(pod, container)
    is_disrupted = ended is not None and ended.reason in disruption.REASONS
    said = "" if sample is None else _said(sample)
    if sample is None or sample.phase in _STARTING:
        said = said or _said_before(told, pod, container)
    failure = ended if is_disrupted else _failure(pod, conditions, container, said, ended, now)
    failure = None if ready or going else failure
    if failure is None and mount_error and awaits_volumes(pod, now):
        detail = reports.printable(mount_error)
        failure = Failure(reason="VolumePending", detail=detail, pod=pod["metadata"]["name"])
    running = "running" in (container.get("state") or {})
    return PodState(
        name=pod["metadata"]["name"],
        current=controller_uid(pod) == newest,
        ready=ready,
        going=going,
        scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        loading=running and not (ready or going or is_disrupted) and (failure is None or failure is ended),
        failure=failure,
        ended=ended,
        sample=sample,
        created=str(pod["metadata"].get("creationTimestamp", "")),
        fetching=running and container.get("name") == names.FETCHER,
        fetched=_fetched(status),
    )


def _fetched(status: Mapping[str, Any]) -> Fetched | None:
    fetcher = named(status, "initContainerStatuses", names.FETCHER)
    fetcher = fetcher or named(status, "containerStatuses", names.FETCHER)
    end = (fetcher.get("state") or {}).get("terminated") or {}
    return reports.parse_fetched(end.get("message")) if end.get("exitCode") == 0 else None


def _is_going(pod: Body) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return "deletionTimestamp" in pod["metadata"] or phase in ("Failed", "Succeeded")


def _conditions(pod: Body) -> dict[str, Mapping[str, Any]]:
    return {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or ()}


def _server(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The server's container or, until it is done, the one that fetches the model for it; of a pod that only
    fetches, that one.
    """
    fetcher = named(status, "initContainerStatuses", names.FETCHER)
    if fetcher and ((fetcher.get("state") or {}).get("terminated") or {}).get("exitCode") != 0:
        return fetcher
    server = named(status, "containerStatuses", names.CONTAINER)
    return server or named(status, "containerStatuses", names.FETCHER)


def named(status: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    """What the kubelet says of a container; empty where it says nothing yet."""
    return next((dict(one) for one in status.get(kind) or () if one.get("name") == name), {})


def _failure(
    pod: Body,
    conditions: Mapping[str, Any],
    container: Mapping[str, Any],
    said: str,
    ended: Failure | None,
    now: datetime,
) -> Failure | None:
    """The reason that is nearest to the engine: what it says, how it ended, what its container waits for."""
    name = pod["metadata"]["name"]
    running = (container.get("state") or {}).get("running")
    if running is not None:
        if said:
            return Failure(reason=said, pod=name)
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
    waits = placement.waits_for(pod, now)
    return None if waits is None else Failure(reason=waits[0], detail=waits[1], pod=name)


def _said(sample: Sample) -> str:
    if sample.reason in _SELF_REPORTED:
        return sample.reason
    return "EngineStalled" if sample.phase == "stalled" else ""


def _said_before(told: Mapping[str, Any], pod: Body, container: Mapping[str, Any]) -> str:
    """What the running container said of itself to an operator that has been restarted since; or before it
    ended, if the next one answers already and the kubelet has not told of that yet.
    """
    started = str(((container.get("state") or {}).get("running") or {}).get("startedAt"))
    if told.get("pod") != pod["metadata"]["name"] or str(told.get("time")) < started:
        return ""
    return str(told["reason"]) if told["reason"] in _SELF_REPORTED else ""


def _served_since(running: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """True when the pod became unready after this container had been ready: its last end explains nothing."""
    changed = str((conditions.get("Ready") or {}).get("lastTransitionTime", ""))
    return bool(changed) and changed > str(running.get("startedAt", ""))


def _disrupted(pod: Body, conditions: Mapping[str, Any]) -> Failure | None:
    """What Kubernetes does to the pod explains how its container ends, and not the other way round."""
    found = disruption.read(pod, conditions)
    if found is None:
        return None
    return Failure(reason=found.reason, detail=found.detail, time=found.time, pod=pod["metadata"]["name"])


def _ended(pod: Body, container: Mapping[str, Any]) -> Failure | None:
    """How the container ended last, unless that was well and its pod had to go."""
    state = container.get("state") or {}
    end = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if not end or (end.get("exitCode") == 0 and _is_going(pod)):
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


assert REASONS.keys() >= _SELF_REPORTED | _SELF_TERMINATED  # a reason without a remedy helps nobody


def by_weight(states: Sequence[PodState]) -> list[PodState]:
    """Pods of the newest revision first, and those whose container ended before those that only wait."""
    return sorted(
        states, key=lambda s: (not s.current, s.failure is None or s.failure.exit_code is None, s.name)
    )
