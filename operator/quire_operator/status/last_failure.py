"""`status.lastFailure`: the newest failure there is, kept when healed. Called by `status.of`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator.status import reasons
from quire_operator.status.pods import Failure, PodState


def newest(
    states: Sequence[PodState], failure: Failure | None, old: Mapping[str, Any], now: str
) -> Mapping[str, Any]:
    """`failure`: the one of now that explains most, if there is one. `old`: what is stored."""
    ended = [state.ended for state in states if state.ended is not None]
    last = max(ended, key=lambda failure: failure.time, default=None)
    chosen = failure if failure is not None and failure.exit_code is None else last
    if chosen is None or (chosen is last and chosen.time < str(old.get("time", ""))):
        return old
    return told(chosen, old, now)


def told(failure: Failure, old: Mapping[str, Any], now: str) -> dict[str, Any]:
    """As it stands in the status; the time of the same failure stays."""
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
