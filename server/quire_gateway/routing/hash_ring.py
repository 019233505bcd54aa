"""A consistent-hash ring with bounded loads: the same key goes to the same replica while that has room.

Where a replica comes or leaves only its own share of the keys moves. All gateways of an install have the same
seed, and so the same ring, without a word between them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping

from xxhash import xxh3_64_intdigest

from quire_gateway.replica import Replica

_POINTS = 128  # of each replica
LOAD_FACTOR = 1.25  # of the mean, the request itself counted


class HashRing:
    """The pods of one model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._uids: frozenset[str] = frozenset()
        self._points: list[int] = []
        self._owners: list[str] = []

    def keep(self, uids: Collection[str]) -> None:
        """These are all pods."""
        if self._uids == frozenset(uids):
            return
        self._uids = frozenset(uids)
        points = sorted(
            (xxh3_64_intdigest(f"{uid}/{number}".encode(), self._seed), uid)
            for uid in self._uids
            for number in range(_POINTS)
        )
        self._points = [point for point, _ in points]
        self._owners = [uid for _, uid in points]

    def home(self, key: int, candidates: Mapping[str, Replica], total: float, now: float) -> Replica | None:
        """The first candidate after the key that has room. ``total``: the load of all candidates. None
        where the ring has none of them.
        """
        bound = LOAD_FACTOR * (total + 1) / max(1, len(candidates))
        start, first, seen = bisect_left(self._points, key), None, set()
        for index in range(len(self._owners)):
            uid = self._owners[(start + index) % len(self._owners)]
            if uid in seen or (replica := candidates.get(uid)) is None:
                continue
            if replica.load(now) + 1 <= bound:
                return replica
            seen.add(uid)
            first = first or replica
            if len(seen) == len(candidates):
                break
        return first
