"""Which watches fall silent: what a re-list found without them, they must have told by the next one.

Asked by the controller. Pure: told of events and of re-lists, it knows no kopf, no cache and no clock. Object
versions are resource versions of one API server, which only grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping


class Watches:
    """What the watch of each kind told, and what re-lists found that it had not told."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, int]] = defaultdict(dict)  # kind -> uid -> version
        self._untold: dict[str, dict[str, int]] = defaultdict(dict)
        self._stale: set[str] = set()

    def told(self, kind: str, uid: str, version: int) -> None:
        """An event, or an object of the list with which a watch begins."""
        self._told[kind][uid] = version

    def told_gone(self, kind: str, uid: str) -> None:
        """The object was deleted: nothing is left of it to tell."""
        self._told[kind].pop(uid, None)
        self._untold[kind].pop(uid, None)

    def has_told(self, kind: str, uid: str) -> bool:
        """Whether it told of this object before. A list that does so again comes after an interruption which
        the API server's memory did not cover: what was deleted meanwhile, nobody tells.
        """
        return uid in self._told[kind]

    def listed(self, kind: str, missed: Iterable[str], versions: Mapping[str, int]) -> bool:
        """True when stale, after a re-list: it found `missed` new or newer, and `versions` is all of it."""
        told = {uid: version for uid, version in self._told[kind].items() if uid in versions}
        late = _untold({uid: v for uid, v in self._untold[kind].items() if uid in versions}, told)
        found = {uid: versions[uid] for uid in missed if uid in versions}
        self._told[kind], self._untold[kind] = told, late | _untold(found, told)
        (self._stale.add if late else self._stale.discard)(kind)
        return bool(late)

    def restarted(self) -> None:
        """The watches begin again: what was found before proves nothing about them."""
        self._untold.clear()
        self._stale.clear()

    @property
    def stale(self) -> list[str]:
        """The kinds whose watches told nothing of what the re-list before the last one had found."""
        return sorted(self._stale)

    @property
    def in_doubt(self) -> bool:
        """Whether something was found that no watch has told yet: another re-list should soon decide."""
        return any(_untold(found, self._told[kind]) for kind, found in self._untold.items())


def _untold(found: Mapping[str, int], told: Mapping[str, int]) -> dict[str, int]:
    return {uid: version for uid, version in found.items() if told.get(uid, -1) < version}
