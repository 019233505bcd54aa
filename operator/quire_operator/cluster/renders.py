"""What ControllerRevisions keep, remembered in little room: under another release of the operator every look
at every LLMDeployment asks for it, and it never changes.

Used by `Cluster` alone. Knows no request.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Container
from typing import Any

from quire_operator.cluster.cache import Key

_MOST = 2  # of an LLMDeployment, of about 2 KB each: the newest, and the one to come back to


class Renders:
    """Contents by the LLMDeployment and the uid of their revision."""

    def __init__(self) -> None:
        self._known: dict[Key, dict[str, bytes]] = defaultdict(dict)

    def put(self, owner: Key, uid: str, data: Any) -> None:
        """Remember what the revision `uid` of `owner` keeps, in place of what was asked for long ago."""
        known = self._known[owner]
        known[uid] = zlib.compress(json.dumps(data).encode())
        if len(known) > _MOST:
            del known[next(iter(known))]

    def get(self, owner: Key, uid: str) -> Any:
        """Freshly decoded; None when it is not known."""
        known = self._known.get(owner, {})
        if uid not in known:
            return None
        known[uid] = text = known.pop(uid)
        return json.loads(zlib.decompress(text))

    def keep(self, uids: Container[str]) -> None:
        """Forget what revisions kept that are no more: `uids` are those of all that are left."""
        kept = {
            owner: {u: text for u, text in known.items() if u in uids} for owner, known in self._known.items()
        }
        self._known = defaultdict(dict, {owner: known for owner, known in kept.items() if known})
