"""Passive ejection: a replica that fails five times in a row gets no requests for a while.

Kubernetes sees only what its probes ask; requests see the rest. After its time a replica is half open: one
request at a time shows whether it is well again; each further ejection is longer. At most half of the
replicas are ejected, because where most of them fail the reason is elsewhere. Pure, with the clock passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

CONSECUTIVE_FAILURES = 5
BASE_SECONDS = 10.0
MAX_SECONDS = 300.0
MAX_SHARE = 0.5


class Verdict(Enum):
    """What one attempt says of its replica."""

    SUCCESS = auto()
    FAILURE = auto()
    UNKNOWN = auto()  # the client hung up, or the replica refused because it is full


@dataclass
class _History:
    failures: int = 0  # in a row
    ejections: int = 0  # in a row
    until: float = 0.0  # ejected until then, half open from then on; 0: neither
    probing: bool = False  # the request that tries a half-open replica is under way


class OutlierDetection:
    """The replicas of one model, by their pods' UIDs. Those that never failed take no memory."""

    def __init__(self, clock: Callable[[], float], max_share: float = MAX_SHARE) -> None:
        self._clock = clock
        self._max_share = max_share
        self._histories: dict[str, _History] = {}
        self.num_ejections = 0

    def takes_requests(self, uid: str) -> bool:
        """Whether a request may go there: none while it is ejected, one at a time while it is half open."""
        history = self._histories.get(uid)
        return history is None or (self._clock() >= history.until and not history.probing)

    def is_ejected(self, uid: str) -> bool:
        """Whether it is ejected or half open."""
        return uid in self._histories and self._histories[uid].until > 0

    def begin(self, uid: str) -> None:
        """A request goes there."""
        if self.is_ejected(uid):
            self._histories[uid].probing = True

    def end(self, uid: str, verdict: Verdict, replicas: Collection[str]) -> None:
        """The request is over. ``replicas``: all that the model has."""
        if verdict is Verdict.SUCCESS:
            self._histories.pop(uid, None)
        elif verdict is Verdict.FAILURE and uid in replicas:
            self._fail(uid, replicas)
        elif uid in self._histories:
            self._histories[uid].probing = False

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the pods that are gone."""
        for uid in self._histories.keys() - set(replicas):
            del self._histories[uid]

    def _fail(self, uid: str, replicas: Collection[str]) -> None:
        history = self._histories.setdefault(uid, _History())
        was_probe, history.probing = history.probing, False
        history.failures += 1
        if history.until and not was_probe:
            return  # it was asked before it was ejected
        ejected = sum(self.is_ejected(one) for one in replicas if one != uid)
        has_room = ejected + 1 <= self._max_share * len(replicas)
        if (was_probe or history.failures >= CONSECUTIVE_FAILURES) and has_room:
            history.ejections += 1
            history.until = self._clock() + min(BASE_SECONDS * history.ejections, MAX_SECONDS)
            self.num_ejections += 1
