"""The Events that a change of the status of an LLMRoute or LLMClient deserves.

What is new is seen by comparing with the status that is stored, so each transition has one Event, whichever
gateway writes. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire_gateway.object_status import generation_of
from quire_gateway.rollout import ABORTED, COMPLETED
from quire_gateway.routing_table import Body, uid_of

_REASONS = {  # of conditions that are False, with the type of the Event
    "NameConflict": "Warning",
    "KeyConflict": "Warning",
    "Unreadable": "Warning",
    "BudgetSpent": "Warning",
}
_MOST_CHARACTERS = 1024  # of a note
_PATH = "/apis/events.k8s.io/v1/namespaces/{}/events"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to an object. ``kind``: Normal or Warning."""

    kind: str
    reason: str
    note: str


def events(body: Body, new: Mapping[str, Any]) -> Iterator[Event]:
    """``body``: an object as it is stored; ``new``: the status that is written."""
    old = body.get("status") or {}
    before, after = _reasons(old), _reasons(new)
    for reason, kind in _REASONS.items():
        if reason in after and reason not in before:
            yield Event(kind, reason, after[reason])
    if _is_stopped_everywhere(new, body) and not _is_stopped_everywhere(old, body):
        switch = body["spec"].get("killSwitch") or {}
        note = "Every gateway refuses requests to it."
        if switch.get("mode") == "Fallback":
            note = "At every gateway its fallbacks answer, and none of its targets."
        yield Event("Normal", "KillSwitchApplied", note)
    yield from _rollout(old.get("rollout") or {}, new.get("rollout") or {})


def path(namespace: str) -> str:
    """Where those of a namespace are created."""
    return _PATH.format(namespace)


def document(event: Event, body: Body, gateway: str, now: str, occurrence: str = "") -> dict[str, Any]:
    """The same for the API server. Two gateways that write at once give it one name, which is there once.
    ``occurrence``: of one that comes again without a new generation of its object.
    """
    metadata = body["metadata"]
    identity = f"{uid_of(body)} {generation_of(body)} {event.reason} {event.note}{occurrence}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "eventTime": now,
        "type": event.kind,
        "reason": event.reason,
        "note": event.note[:_MOST_CHARACTERS],
        "action": "Route",
        "reportingController": "serving.quire.dev/quire-gateway",
        "reportingInstance": gateway[:128],
        "regarding": {
            "apiVersion": body.get("apiVersion", ""),
            "kind": body.get("kind", ""),
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": uid_of(body),
        },
    }


def _rollout(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    if not new:
        return
    phase, note = str(new["phase"]), str(new["message"])
    if phase in (ABORTED, COMPLETED):
        if (old.get("phase"), old.get("digest")) != (phase, new.get("digest")):
            kind = "Warning" if phase == ABORTED else "Normal"
            yield Event(kind, f"Rollout{phase}", note)
    elif any(old.get(name) != new.get(name) for name in ("digest", "step", "currentWeight")):
        yield Event("Normal", "RolloutStep", note)


def _reasons(status: Mapping[str, Any]) -> dict[str, str]:
    """The message of each reason for which a condition is False."""
    conditions = status.get("conditions") or ()
    return {one["reason"]: one["message"] for one in conditions if one.get("status") == "False"}


def _is_stopped_everywhere(status: Mapping[str, Any], body: Body) -> bool:
    gateways = status.get("gateways") or {}
    is_current = status.get("observedGeneration") == generation_of(body)
    return (
        is_current and "KillSwitch" in _reasons(status) and 0 < gateways.get("seen", 0) == gateways["applied"]
    )
