"""Names each object that could not be read in full: in the log once a version, and in a metric.

One such object must not stop what is done for all others, and must not go unnoticed either.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from prometheus_client import Counter

logger = logging.getLogger(__name__)

_REMEMBERED = 1000


class UnreadableObjects:
    """`counter` has the label "kind"."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()  # uid and version

    def __call__(self, body: dict[str, Any], why: str) -> None:
        """Report the object `body`, of which at least the metadata could be read."""
        kind, metadata = str(body.get("kind", "object")), body.get("metadata") or {}
        self._counter.labels(kind).inc()
        version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        if version in self._logged:
            return
        self._logged[version] = None
        if len(self._logged) > _REMEMBERED:
            self._logged.popitem(last=False)
        place = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
        logger.error("%s %s cannot be read in full: %s; correct or delete it", kind, place, why)
