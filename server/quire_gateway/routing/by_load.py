"""Policies that do not look at the request: in turn, by chance, and by load.

PowerOfTwo is the one for several gateways: numbers that were polled are the same for all of them, and the
least of all would get everyone's requests until the next poll.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire_gateway.replica import Replica
from quire_gateway.routing.router import Pick, RequestFacts, Stateless


class RoundRobin(Stateless):
    """One after the other."""

    def __init__(self) -> None:
        self._number = 0

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        if not candidates:
            return None
        self._number += 1
        return Pick(candidates[self._number % len(candidates)], "turn")


class Random(Stateless):
    """Any."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        return Pick(self._chance.choice(candidates), "random") if candidates else None


class LeastLoad(Stateless):
    """The replica with the fewest requests, any of them where several have as few."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        if len(candidates) < 2:
            return Pick(candidates[0], "only") if candidates else None
        loads = [one.load(now) for one in candidates]
        least = min(loads)
        best = [one for one, load in zip(candidates, loads, strict=True) if load == least]
        return Pick(best[0], "least_load") if len(best) == 1 else Pick(self._chance.choice(best), "tie")


class PowerOfTwo(Stateless):
    """The less busy one of two."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        if len(candidates) < 2:
            return Pick(candidates[0], "only") if candidates else None
        one, other = self._chance.sample(candidates, 2)
        return Pick(one if one.load(now) <= other.load(now) else other, "least_of_two")
