"""How often a manifest is applied again when another client keeps undoing it.

The first few repairs are made at once; after that one every few seconds, so that two controllers that
disagree about a field do not flood the API server. Pure: the history of applies is passed in and returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire_operator import names
from quire_operator.observed import Ref, ref
from quire_operator.plan.plan import Plan

REPAIRS_AT_ONCE = 5
REPAIR_WINDOW_SECONDS = 60.0
REPAIR_INTERVAL_SECONDS = 10.0  # once that many were made within the window

# When each manifest (the object and its applied hash) was applied, in seconds of the monotonic clock.
ApplyTimes = Mapping[tuple[Ref, str], tuple[float, ...]]


def pace_repairs(plan: Plan, applied: ApplyTimes, now: float) -> tuple[Plan, ApplyTimes, float | None]:
    """The plan without the applies that come too soon, the history with those that remain, and the seconds
    until the first postponed one is due (None where none was postponed).
    """
    recent = {
        manifest: kept
        for manifest, times in applied.items()
        if (kept := tuple(time for time in times if time >= now - REPAIR_WINDOW_SECONDS))
    }
    apply, waits = [], []
    for manifest in plan.apply:
        identity = (ref(manifest), manifest["metadata"]["annotations"][names.ANNOTATION_APPLIED_HASH])
        times = recent.get(identity, ())
        wait = times[-1] + REPAIR_INTERVAL_SECONDS - now if len(times) >= REPAIRS_AT_ONCE else 0.0
        if wait > 0:
            waits.append(wait)
        else:
            recent[identity] = (*times, now)
            apply.append(manifest)
    return replace(plan, apply=tuple(apply)), recent, min(waits, default=None)
