"""A small cache of the data of ControllerRevisions.

After an upgrade of the operator every reconcile needs the stored revision, whose data never changes. Sends no
request.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Container
from typing import Any

from quire_operator.cluster.cache import Key

_MAX_ENTRIES = 2  # per LLMDeployment, about 2 KB each: the update revision, and the one to roll back to


class RevisionCache:
    """Revision data by LLMDeployment and uid; the least recently used entries are dropped."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[str, bytes]] = defaultdict(dict)

    def put(self, owner: Key, uid: str, data: Any) -> None:
        """Store the data of the revision `uid` of `owner`."""
        known = self._known[owner]
        known[uid] = zlib.compress(json.dumps(data).encode())
        if len(known) > _MAX_ENTRIES:
            del known[next(iter(known))]

    def get(self, owner: Key, uid: str) -> Any:
        """The data, freshly decoded; None where it is not cached."""
        known = self._known.get(owner, {})
        if uid not in known:
            return None
        known[uid] = text = known.pop(uid)
        return json.loads(zlib.decompress(text))

    def keep(self, uids: Container[str]) -> None:
        """Drop the data of deleted revisions; `uids`: of all that exist."""
        kept = {
            owner: {u: text for u, text in known.items() if u in uids} for owner, known in self._known.items()
        }
        self._known = defaultdict(dict, {owner: known for owner, known in kept.items() if known})
