"""What changed between two statuses: the merge patch to write, and the Events to record.

An Event is recorded once for each reason that the stored status does not have, so that a restarted operator
repeats none. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.status import disruption
from quire_operator.status.conditions import SURGE_UNSCHEDULABLE
from quire_operator.status.reasons import REASONS

_WANTED = (
    "ScalingActive",
    "ActivatorReady",
    "FitsAccelerator",
    "DrainFitsNotice",
    "Routed",
    "RanksAuthenticated",
    "TransfersAuthenticated",
    "AdaptersReady",
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """An Event of an LLMDeployment, as `kubectl describe` shows it."""

    kind: str  # Normal or Warning
    reason: str
    note: str
    action: str = "Reconcile"


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes `old` into `new`; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


def is_progress_only(patch: Mapping[str, Any]) -> bool:
    """True for a patch that only updates the loading progress, and so can wait."""
    progress = {"bytesLoaded", "bytesPerSecond", "etaSeconds"}
    return set(patch) == {"model"} and isinstance(patch["model"], Mapping) and set(patch["model"]) <= progress


def is_transient(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True for an intermediate state: no Event to record, and the same phase and number of ready replicas."""
    kept = ("phase", "observedGeneration", "readyReplicas")
    return not events(old, new) and all(old.get(key) == new.get(key) for key in kept)


def events(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Event, ...]:
    """One Warning for each new reason of trouble and for each pod that is disrupted, one Normal when it
    becomes Ready or falls back to in-place replacement.
    """
    trouble, known = _trouble(new) | _disrupted(old, new), _trouble(old)
    found = [
        Event(kind="Warning", reason=reason, note=note)
        for reason, note in trouble.items()
        if reason not in known
    ]
    complete = _condition(new, "RolloutComplete")
    if complete.get("reason") == SURGE_UNSCHEDULABLE != _condition(old, "RolloutComplete").get("reason"):
        found.append(Event(kind="Normal", reason=SURGE_UNSCHEDULABLE, note=str(complete.get("message", ""))))
    state = (new.get("sharing") or {}).get("state")
    ready = _condition(new, "Ready")
    if state in ("Asleep", "Waiting") and state != (old.get("sharing") or {}).get("state"):
        found.append(Event(kind="Normal", reason=state, note=str(ready.get("message", ""))))
    if ready.get("status") == "True" and _condition(old, "Ready").get("status") != "True":
        found.append(Event(kind="Normal", reason="Ready", note=str(ready.get("message", ""))))
    return tuple(found)


def _disrupted(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """A disrupted pod, where it has not been reported yet and nothing is degraded."""
    before, last = old.get("lastFailure") or {}, new.get("lastFailure") or {}
    is_new = any(before.get(key) != last.get(key) for key in ("reason", "pod"))
    if not is_new or last.get("reason") not in disruption.REASONS:
        return {}
    return {str(last["reason"]): str(last["message"])}


def _trouble(status: Mapping[str, Any]) -> dict[str, str]:
    found = [
        _condition(status, kind) for kind in ("Degraded", "Stalled", "ContextReduced", "TransferDegraded")
    ]
    trouble = {str(c.get("reason")): str(c.get("message")) for c in found if c.get("status") == "True"}
    for wanted in (_condition(status, kind) for kind in _WANTED):
        if wanted.get("status") == "False" and wanted.get("reason") in REASONS:
            trouble[str(wanted["reason"])] = str(wanted.get("message"))
    return trouble


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for condition in status.get("conditions") or ():
        if isinstance(condition, Mapping) and condition.get("type") == kind:
            return condition
    return {}
