"""status.sharing: whose turn it is among LLMDeployments that share an accelerator, and what that means for
the conditions.

The turn is decided elsewhere. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire_operator.observed import Observed
from quire_operator.status import reasons
from quire_operator.status.reasons import ConditionValue

ASLEEP, WAITING = "Asleep", "Waiting"


@dataclass(frozen=True, kw_only=True)
class TurnState:
    """`state`: Awake, Waiting or Asleep. `awake`: the member whose turn it is, empty where none may run.
    `turn_at`: when its own begins at the latest. `behind_until`: until when it is put behind the others after
    failed turns. `swap_seconds`: what its last turn took to begin, None where that is not known.
    """

    pool: str
    state: str
    awake: str = ""
    turn_at: datetime | None = None
    behind_until: datetime | None = None
    swap_seconds: float | None = None


def summary(turn: TurnState | None, old: Mapping[str, Any]) -> dict[str, Any]:
    """status.sharing. `old`: as stored."""
    if turn is None:
        return {}
    took = old.get("lastSwapSeconds") if turn.swap_seconds is None else round(turn.swap_seconds)
    known = {"awake": turn.awake or None, "turnTime": _text(turn.turn_at), "lastSwapSeconds": took}
    found = {"pool": turn.pool, "state": turn.state}
    return found | {key: value for key, value in known.items() if value is not None}


def not_ready(turn: TurnState | None, observed: Observed) -> ConditionValue | None:
    """Why no pod is wanted, as the condition Ready says it; None while one is."""
    wanted = ((observed.workload or {}).get("spec") or {}).get("replicas")
    if turn is None or wanted != 0:
        return None
    if turn.state == WAITING and turn.awake == observed.name:
        return "False", WAITING, "Its pod starts when those that have the accelerator are gone."
    by = f"{turn.awake} has the accelerator of the pool {turn.pool}" if turn.awake else "no pod may run"
    if turn.state == WAITING and turn.behind_until is not None:
        failed = "In its last turn its pod was not ready within health.startupTimeoutSeconds"
        return "False", WAITING, f"{failed}: the others come first until {_text(turn.behind_until)}."
    if turn.state == WAITING:
        return "False", WAITING, f"Requests wait: {by}, and makes room when its minimum stay is over."
    return "False", ASLEEP, f"No pod runs: {by}, until requests at the gateway ask for this one."


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def activator(turn: TurnState, *, has_gateway: bool) -> ConditionValue:
    """ActivatorReady of a member."""
    if has_gateway:
        return "True", "GatewayInstalled", "The gateway holds requests while no pod runs."
    return "False", "PoolWithoutGateway", reasons.message("PoolWithoutGateway")
