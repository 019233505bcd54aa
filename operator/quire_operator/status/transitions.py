"""What changed between two statuses: the patch that is to be written, and the Events that tell of it.

Called by reconcile with the stored status and the new one. An Event is told once for each reason that was
not there before, so a restarted operator, which finds the reason in the stored status, tells nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.status import disruption
from quire_operator.status.conditions import SURGE_UNSCHEDULABLE
from quire_operator.status.reasons import REASONS

_WANTED = ("ScalingActive", "ActivatorReady", "FitsAccelerator", "Routed")


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to an LLMDeployment, for people who read `kubectl describe`."""

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
    """True for a patch that only says how far loading is: it can wait a little."""
    progress = {"bytesLoaded", "bytesPerSecond", "etaSeconds"}
    return set(patch) == {"model"} and isinstance(patch["model"], Mapping) and set(patch["model"]) <= progress


def is_in_passing(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True between two turns of a story: no Event to tell, and as many replicas ready as before."""
    kept = ("phase", "observedGeneration", "readyReplicas")
    return not events(old, new) and all(old.get(key) == new.get(key) for key in kept)


def events(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Event, ...]:
    """One Warning for each new reason of trouble and for each pod that is disrupted, one Normal when it
    becomes Ready or gives up to surge.
    """
    trouble, known = _trouble(new) | _disrupted(old, new), _trouble(old)
    told = [
        Event(kind="Warning", reason=reason, note=note)
        for reason, note in trouble.items()
        if reason not in known
    ]
    complete = _condition(new, "RolloutComplete")
    if complete.get("reason") == SURGE_UNSCHEDULABLE != _condition(old, "RolloutComplete").get("reason"):
        told.append(Event(kind="Normal", reason=SURGE_UNSCHEDULABLE, note=str(complete.get("message", ""))))
    ready = _condition(new, "Ready")
    if ready.get("status") == "True" and _condition(old, "Ready").get("status") != "True":
        told.append(Event(kind="Normal", reason="Ready", note=str(ready.get("message", ""))))
    return tuple(told)


def _disrupted(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """A pod that had to go although nothing is degraded, where that is news."""
    before, last = old.get("lastFailure") or {}, new.get("lastFailure") or {}
    is_news = any(before.get(key) != last.get(key) for key in ("reason", "pod"))
    if not is_news or last.get("reason") not in disruption.REASONS:
        return {}
    return {str(last["reason"]): str(last["message"])}


def _trouble(status: Mapping[str, Any]) -> dict[str, str]:
    found = [_condition(status, kind) for kind in ("Degraded", "Stalled")]
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
