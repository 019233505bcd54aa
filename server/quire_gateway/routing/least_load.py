"""The replica with the fewest requests, any of them where several have as few."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire_gateway.replicas import Replica


@dataclass(frozen=True, slots=True)
class Pick:
    """A replica, and why it was chosen."""

    replica: Replica
    reason: str


def pick(candidates: Sequence[Replica], now: float, chance: random.Random) -> Pick | None:
    """The choice, None without a candidate."""
    if len(candidates) < 2:
        return Pick(candidates[0], "only") if candidates else None
    loads = [one.load(now) for one in candidates]
    least = min(loads)
    best = [one for one, load in zip(candidates, loads, strict=True) if load == least]
    return Pick(best[0], "least_load") if len(best) == 1 else Pick(chance.choice(best), "tie")
