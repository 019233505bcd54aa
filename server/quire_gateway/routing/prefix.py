"""Sends a prompt where most of its beginning is cached, unless that replica is much busier than others.

Four candidates are scored, however many replicas there are: the one that knows most of the prompt, the home
of its prefix by consistent hash, and two by chance. The score is the share of the prompt that is known, less
the load relative to the mean; home has a bonus. Where prompts do not repeat home fades as a candidate, and
two by chance are left: of more the least is the same for all gateways until the next poll. So gateways that
share nothing send a new prefix to the same replica, there is no load at which locality ends at once, and no
single replica that all of them find best.

The home of a prompt is that of its first block after what half of the replicas know, such as a system prompt
that all requests have. docs/adr/0045 has the reasons.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence

from quire_gateway.replica import Replica
from quire_gateway.routing.hash_ring import HashRing
from quire_gateway.routing.prefix_index import Match, PrefixIndex
from quire_gateway.routing.prompt_blocks import digests
from quire_gateway.routing.router import Pick, RequestFacts

_LOAD_WEIGHT, _OVERLOAD_WEIGHT = 0.25, 0.75
_LEAST_LOAD, _MOST_LOAD = -1.0, 3.0  # of the load relative to the mean
_HOME_BONUS = 0.1
_FULL_BONUS_SHARE = 0.1  # of prompts that is known, on average, from which the bonus is whole
_MEMORY = 0.01  # the weight of one request in that average

Publish = Callable[[str, Sequence[int]], None]


class Prefix:
    """The policy of one model. ``publish`` is called with the pod and the blocks of each choice."""

    def __init__(self, chance: random.Random, seed: int, publish: Publish | None = None) -> None:
        self._chance = chance
        self._seed = seed
        self._publish = publish
        self._ring = HashRing(seed)
        self.index = PrefixIndex()
        self._known_share = _FULL_BONUS_SHARE

    def pick(self, facts: RequestFacts, candidates: Sequence[Replica], now: float) -> Pick | None:
        """The choice; None without a candidate."""
        if not candidates:
            return None
        blocks = digests(facts, self._seed)
        match = self.index.match(blocks)
        if len(candidates) == 1:
            replica, reason = candidates[0], "only"
        else:
            replica, reason = self._choose(blocks, match, candidates, now)
        uid = replica.endpoint.uid
        num_known = match.depth(self.index.bit(uid))
        self.index.add(uid, blocks)
        if self._publish is not None and blocks:
            self._publish(uid, blocks)
        return Pick(replica, reason, blocks, num_known)

    def keep(self, uids: Collection[str]) -> None:
        """These are all pods; what others had in their caches is gone."""
        self._ring.keep(uids)
        self.index.keep(uids)

    def answered(self, choice: Pick, cached_tokens: int) -> None:
        """Where nothing of what was known was cached, the pod has lost it."""
        if choice.num_known and not cached_tokens:
            self.index.drop(choice.replica.endpoint.uid, choice.digests[: choice.num_known])

    def learn(self, uid: str, digests: Sequence[int]) -> None:
        """Another gateway sent a prompt of these blocks to this pod."""
        self.index.add(uid, digests)

    def _choose(
        self, blocks: Sequence[int], match: Match, candidates: Sequence[Replica], now: float
    ) -> tuple[Replica, str]:
        by_uid = {one.endpoint.uid: one for one in candidates}
        total = sum(one.load(now) for one in candidates)
        best = self._best(match, by_uid, now)
        share = match.depth(self.index.bit(best.endpoint.uid)) / len(blocks) if best and blocks else 0.0
        self._known_share += _MEMORY * (share - self._known_share)
        repeats = min(1.0, self._known_share / _FULL_BONUS_SHARE)
        home = None
        if blocks and self._chance.random() < repeats:
            home = self._ring.home(self._anchor(blocks, match), by_uid, total, now)
        bonus = _HOME_BONUS * repeats
        mean = max(1.0, total / len(candidates))  # fewer than one request each is no load

        def score(replica: Replica) -> float:
            relative = min(_MOST_LOAD, max(_LEAST_LOAD, replica.load(now) / mean - 1.0))
            known = match.depth(self.index.bit(replica.endpoint.uid)) / max(1, len(blocks))
            load = _LOAD_WEIGHT * relative + _OVERLOAD_WEIGHT * max(0.0, relative) ** 2
            return known - load + bonus * (replica is home)

        named = {"prefix": best, "home": home}
        choices = {one.endpoint.uid: (one, name) for name, one in reversed(named.items()) if one}
        for one in self._chance.sample(candidates, 2):
            choices.setdefault(one.endpoint.uid, (one, "load"))
        return max(choices.values(), key=lambda choice: score(choice[0]))

    def _best(self, match: Match, by_uid: Mapping[str, Replica], now: float) -> Replica | None:
        """The candidate that knows most of the prompt; of several the less busy one of two."""
        for mask in reversed(match.masks):
            known = [by_uid[uid] for uid in self.index.owners(mask) if uid in by_uid]
            if known:
                return min(self._chance.sample(known, min(2, len(known))), key=lambda one: one.load(now))
        return None

    def _anchor(self, blocks: Sequence[int], match: Match) -> int:
        """The first block after those that half of the replicas know."""
        common = match.common(max(2, -(-self.index.num_pods // 2)))
        return blocks[min(common, len(blocks) - 1)]
