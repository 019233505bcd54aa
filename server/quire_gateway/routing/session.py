"""Requests of one session go to one replica: while its pod is there, whatever its load is.

A session is what a header says, or the body's `user`. A new one is placed by consistent hash, so that
gateways place it alike. Requests without a session go to the less busy one of two.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence

from xxhash import xxh3_64_intdigest

from quire_gateway.replica import Replica
from quire_gateway.routing.by_load import PowerOfTwo
from quire_gateway.routing.hash_ring import HashRing
from quire_gateway.routing.router import Pick, RequestFacts, Stateless

_MAX_SESSIONS = 1 << 16  # the oldest is placed anew


class Session(Stateless):
    """The policy of one model."""

    def __init__(self, chance: random.Random, seed: int, header: str) -> None:
        self._header = header.lower().encode("latin-1")
        self._seed = seed
        self._ring = HashRing(seed)
        self._without = PowerOfTwo(chance)
        self._pods: OrderedDict[int, str] = OrderedDict()  # by the session's hash

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        session = next((value for name, value in facts.headers if name == self._header), b"")
        session = session or facts.user.encode("utf-8", "surrogatepass")
        if not session or len(candidates) < 2:
            return self._without.pick(facts, candidates, now)
        key = xxh3_64_intdigest(session, self._seed)
        by_uid = {one.endpoint.uid: one for one in candidates}
        replica, reason = by_uid.get(self._pods.get(key, "")), "session"
        if replica is None:
            total = sum(one.load(now) for one in candidates)
            replica, reason = self._ring.home(key, by_uid, total, now), "new_session"
        if replica is None:
            return self._without.pick(facts, candidates, now)
        self._pods[key] = replica.endpoint.uid
        self._pods.move_to_end(key)
        if len(self._pods) > _MAX_SESSIONS:
            self._pods.popitem(last=False)
        return Pick(replica, reason)

    def keep(self, uids: Collection[str]) -> None:
        """These are all pods; the sessions of others are placed anew when they come."""
        self._ring.keep(uids)
