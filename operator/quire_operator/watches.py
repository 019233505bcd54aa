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
        self._late: dict[str, dict[str, _Found]] = defaultdict(dict)

    def told(self, kind: str, uid: str, version: int) -> None:
        """An event, or an object of the list with which a watch begins."""
        self._told[kind][uid] = version

    def told_gone(self, kind: str, uid: str) -> None:
        """The object was deleted: nothing is left of it to tell."""
        for known in (self._told, self._untold, self._late):
            known[kind].pop(uid, None)

    def has_told(self, kind: str, uid: str) -> bool:
        """Whether it told of this object before. A list that does so again comes after an interruption which
        the API server's memory did not cover: what was deleted meanwhile, nobody tells.
        """
        return uid in self._told[kind]

    def listed(self, kind: str, missed: Iterable[str], versions: Mapping[str, int], now: float) -> None:
        """A re-list at `now` seconds found `missed` new or newer; `versions` is all of it. What is late is
        decided here: only a list tells what is still there to be told.
        """
        self._told[kind] = told = {uid: v for uid, v in self._told[kind].items() if uid in versions}
        waiting = _missing({uid: f for uid, f in self._untold[kind].items() if uid in versions}, told)
        found = {uid: _Found(versions[uid], now) for uid in missed if uid in versions}
        self._late[kind] = {uid: f for uid, f in waiting.items() if now - f.at >= self._patience}
        self._untold[kind] = waiting | _missing(found, told)

    def restarted(self) -> None:
        """The watches begin again: what was found before proves nothing about them."""
        self._untold.clear()
        self._late.clear()

    @property
    def stale(self) -> list[str]:
        """The kinds whose watches are late with what a re-list found; told, they are well at once."""
        return sorted(kind for kind, late in self._late.items() if _missing(late, self._told[kind]))

    @property
    def in_doubt(self) -> bool:
        """Whether something was found that no watch has told yet: another re-list should soon decide."""
        return any(_missing(found, self._told[kind]) for kind, found in self._untold.items())


def _missing(found: Mapping[str, _Found], told: Mapping[str, int]) -> dict[str, _Found]:
    return {uid: f for uid, f in found.items() if told.get(uid, -1) < f.version}
