"""What a pod without a node waits for: an accelerator, quota, a volume, or any node at all.

Called by `pods`. Pure; reads the scheduler's words and the gates that hold the pod back.
"""

from __future__ import annotations

import re
from datetime import datetime

from quire_operator import reports
from quire_operator.observed import (
    Body,
    is_held_by_kueue,
    scheduler_says,
    scheduling_gates,
    unscheduled_since,
)
from quire_operator.observed import seconds_since as elapsed

# A claim that is being bound, or a node that frees up, takes a moment in health, too.
GRACE_SECONDS = 5.0

_VOLUME_WORDS = re.compile(r"persistentvolumeclaim|volume", re.IGNORECASE)
_PLAIN = frozenset({"cpu", "memory", "ephemeral-storage"})


def waits_for(pod: Body, now: datetime) -> tuple[str, str] | None:
    """Reason and detail; None for a pod that has a node, or waits for a moment only."""
    since = unscheduled_since(pod)
    if not since or elapsed(since, now) < GRACE_SECONDS:
        return None
    gates = ", ".join(reports.printable(gate) for gate in scheduling_gates(pod))
    if is_held_by_kueue(pod):
        return "WaitingForQuota", f"scheduling gate {gates}"
    if gates:
        return "WaitingForNode", f"held back by the scheduling gate {gates}"
    detail = reports.printable(scheduler_says(pod))
    if _VOLUME_WORDS.search(detail):
        return "VolumePending", detail
    lacks = any(f"Insufficient {device}" in detail for device in _devices(pod))
    return ("WaitingForGPU" if lacks else "WaitingForNode"), detail


def _devices(pod: Body) -> set[str]:
    containers = (pod.get("spec") or {}).get("containers") or ()
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return {str(name) for each in limits for name in each} - _PLAIN
