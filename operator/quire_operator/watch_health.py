"""Detects watches that stopped delivering events: what a re-list finds, the watch must report within
seconds.

Pure: it is fed with events, re-lists and times, and knows no kopf, cache or clock. Versions are resource
versions of one API server, which only grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class _Found(NamedTuple):
    """A version that a re-list found before the watch reported it, and when."""

    version: int
    at: float


class WatchHealth:
    """For each kind: what its watch has reported, and what re-lists found that it has not."""

    def __init__(self, tolerance: float) -> None:
        """`tolerance`: seconds by which an event may be late, and a watch may take to restart."""
        self._tolerance = tolerance
        self._seen: dict[str, dict[str, int]] = defaultdict(dict)  # kind -> uid -> version
        self._missed: dict[str, dict[str, _Found]] = defaultdict(dict)
        self._relisted_at: dict[str, float] = {}  # kind -> the last re-list

    def on_event(self, kind: str, uid: str, version: int) -> None:
        """The watch reported the object: in an event, or in the list with which a watch starts."""
        self._seen[kind][uid] = version
        found = self._missed[kind].get(uid)
        if found is not None and found.version <= version:
            del self._missed[kind][uid]

    def on_delete(self, kind: str, uid: str) -> None:
        """The watch reported the deletion of the object: no other event of it is expected."""
        self._seen[kind].pop(uid, None)
        self._missed[kind].pop(uid, None)

    def has_seen(self, kind: str, uid: str) -> bool:
        """Whether the watch reported this object before. A starting list that contains it again follows an
        interruption in which deletions may have been lost.
        """
        return uid in self._seen[kind]

    def on_relist(self, kind: str, missed: Iterable[str], versions: Mapping[str, int], now: float) -> None:
        """A re-list at `now` found the uids `missed` new or newer than the cache; `versions` is the full
        list.
        """
        self._seen[kind] = seen = {uid: v for uid, v in self._seen[kind].items() if uid in versions}
        new = {uid: versions[uid] for uid in missed if seen.get(uid, -1) < versions.get(uid, -1)}
        pending = {uid: _Found(version, now) for uid, version in new.items()} | self._missed[kind]
        self._missed[kind] = {uid: found for uid, found in pending.items() if uid in versions}
        self._relisted_at[kind] = now

    def reset(self) -> None:
        """The watches start again: what was found before proves nothing about them."""
        self._missed.clear()

    @property
    def stale(self) -> list[str]:
        """The kinds whose watch was late at the last re-list and still is. Elapsed time alone is no proof:
        only a re-list shows what the watch should have reported.
        """
        return sorted(kind for kind, now in self._relisted_at.items() if self._is_late(kind, now))

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a re-list found something that its watch has not reported yet: the next one should be
        soon.
        """
        return any(self._missed.values())

    def _is_late(self, kind: str, now: float) -> bool:
        return any(now - found.at >= self._tolerance for found in self._missed[kind].values())
