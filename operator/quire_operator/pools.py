"""The turns of LLMDeployments that share an accelerator.

A turn is decided by `plan.sharing` from what the cache has of all members. What was decided last is kept in
memory: after a restart it follows from the pods that run. The work queue gives out one member of a pool at a
time, so that what one of them has decided is carried out before the next one looks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from quire_operator import names, spec
from quire_operator.cluster import Cluster, Key
from quire_operator.errors import SpecError
from quire_operator.observed import Observed
from quire_operator.plan import sharing
from quire_operator.spec import LLMDeployment


@dataclass(frozen=True, kw_only=True)
class Place:
    """That of one member in its pool. `others`: members that have something to do: to start or stop a pod, or
    to say whose turn it is.
    """

    schedule: sharing.Schedule
    pool: str
    is_awake: bool
    others: tuple[Key, ...]


class Pools:
    """`now`: the time of decisions."""

    def __init__(self, cluster: Cluster, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._now = now
        self._turns: dict[Key, sharing.Turn] = {}  # by namespace and pool
        self._refused: set[Key] = set()  # members that have just not been applied

    def place_of(self, key: Key, *, is_refused: bool = False) -> Place | None:
        """Decide whose turn it is; None for a model that shares nothing. `is_refused`: this one cannot be
        applied now.
        """
        name = self._cluster.cache.pool_of(key)
        if not name:
            self._refused.discard(key)
            return None
        (self._refused.add if is_refused else self._refused.discard)(key)
        self._refused = {one for one in self._refused if self._cluster.cache.pool_of(one)}
        pool, now = Key(key.namespace, name), self._now()
        observed, has_others = self._cluster.sharing(pool, lambda pod: sharing.is_lost(pod, now))
        members = [self._member(Key(pool.namespace, one.name), one, now) for one in observed]
        last = self._turns.get(pool)
        decided = sharing.schedule(members, last, now.timestamp(), has_others=has_others)
        others = decided.to_change() if _is_same(last, decided.turn) else {one.name for one in members}
        self._turns = {one: turn for one, turn in self._turns.items() if self._cluster.cache.has_pool(one)}
        if decided.turn is None:
            self._turns.pop(pool, None)
        else:
            self._turns[pool] = decided.turn
        return Place(
            schedule=decided,
            pool=pool.name,
            is_awake=decided.is_awake(key.name),
            others=tuple(Key(pool.namespace, name) for name in sorted(others - {key.name})),
        )

    def left_by(self, key: Key) -> tuple[Key, ...]:
        """The members of pools in which `key` still has the turn, though it is deleted or in another pool:
        none of them gets an event of that.
        """
        body = self._cluster.cache.get(names.KIND, *key)
        stays = body is not None and "deletionTimestamp" not in body["metadata"]
        name = self._cluster.cache.pool_of(key) if stays else ""
        had = [pool for pool, turn in self._turns.items() if (pool.namespace, turn.member) == key]
        left = [pool for pool in had if pool.name != name]
        return tuple(one for pool in left for one in self._cluster.cache.members(pool) if one != key)

    def _member(self, key: Key, observed: Observed, now: datetime) -> sharing.Member:
        waits = self._cluster.waits.get(key, 0.0)
        return sharing.member(_parsed(observed), observed, waits, now, is_refused=key in self._refused)


def _is_same(last: sharing.Turn | None, turn: sharing.Turn | None) -> bool:
    """Whether members have nothing else to say of it."""
    known = [None if one is None else (one.member, one.ready_at) for one in (last, turn)]
    return known[0] == known[1]


def _parsed(observed: Observed) -> LLMDeployment | None:
    try:
        return spec.parse(observed.body)
    except SpecError:
        return None
