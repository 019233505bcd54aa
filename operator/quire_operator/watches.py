"""Which watches fall silent: what a re-list found without them, they must tell within seconds.

Asked by the controller. Pure: told of events, of re-lists and of the time, it knows no kopf, no cache and no
clock. Object versions are resource versions of one API server, which only grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _Found(NamedTuple):
    """A version that a re-list found, and when."""

    version: int
    at: float


class Watches:
    """What the watch of each kind told, and what re-lists found that it had not told."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds for which a watch may be late, or begin again after an interruption."""
        self._patience = patience
        self._told: dict[str, dict[str, int]] = defaultdict(dict)  # kind -> uid -> version
        self._untold: dict[str, dict[str, _Found]] = defaultdict(dict)
        self._listed: dict[str, float] = {}  # kind -> when last

    def told(self, kind: str, uid: str, version: int) -> None:
        """An event, or an object of the list with which a watch begins."""
        self._told[kind][uid] = version
        found = self._untold[kind].get(uid)
        if found is not None and found.version <= version:
            del self._untold[kind][uid]

    def told_gone(self, kind: str, uid: str) -> None:
        """The object was deleted: nothing is left of it to tell."""
        self._told[kind].pop(uid, None)
        self._untold[kind].pop(uid, None)

    def has_told(self, kind: str, uid: str) -> bool:
        """Whether it told of this object before. A list that does so again comes after an interruption which
        the API server's memory did not cover: what was deleted meanwhile, nobody tells.
        """
        return uid in self._told[kind]

    def listed(self, kind: str, missed: Iterable[str], versions: Mapping[str, int], now: float) -> None:
        """A re-list at `now` seconds found `missed` new or newer; `versions` is all of it."""
        self._told[kind] = told = {uid: v for uid, v in self._told[kind].items() if uid in versions}
        new = {uid: versions[uid] for uid in missed if told.get(uid, -1) < versions.get(uid, -1)}
        untold = {uid: _Found(version, now) for uid, version in new.items()} | self._untold[kind]
        self._untold[kind] = {uid: found for uid, found in untold.items() if uid in versions}
        self._listed[kind] = now

    def restarted(self) -> None:
        """The watches begin again: what was found before proves nothing about them."""
        self._untold.clear()

    @property
    def stale(self) -> list[str]:
        """The kinds whose watches were late at their last re-list, and still are. The time alone proves
        nothing: only a list says what is still there to be told.
        """
        return sorted(kind for kind, now in self._listed.items() if self._is_late(kind, now))

    @property
    def in_doubt(self) -> bool:
        """Whether something was found that no watch has told yet: another re-list should soon decide."""
        return any(self._untold.values())

    def _is_late(self, kind: str, now: float) -> bool:
        return any(now - found.at >= self._patience for found in self._untold[kind].values())
