"""What ControllerRevisions keep, remembered in little room: under another release of the operator every look
at every LLMDeployment asks for it, and it never changes.

Used by `Cluster` alone. Knows no request.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Container
from typing import Any

_MOST = 5_000  # of about 2 KB each


class Renders:
    """Contents by the uid of their revision; beyond the most that are kept the oldest goes."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, bytes] = OrderedDict()

    def put(self, uid: str, data: Any) -> None:
        """Remember what the revision `uid` keeps."""
        self._known[uid] = zlib.compress(json.dumps(data).encode())
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def get(self, uid: str) -> Any:
        """Freshly decoded; None when it is not known."""
        text = self._known.get(uid)
        return None if text is None else json.loads(zlib.decompress(text))

    def keep(self, uids: Container[str]) -> None:
        """Forget what revisions kept that are no more: `uids` are those of all that are left."""
        for uid in [known for known in self._known if known not in uids]:
            del self._known[uid]
