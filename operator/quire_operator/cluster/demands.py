"""Watches the Leases by which gateways say that requests wait for a model without pods.

They are in the operator's own namespace, which kopf's watches do not know by itself. A renewal counts from
when it is seen, so that clocks that differ do no harm. Decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import aiohttp

from quire_operator import names
from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Key, Object
from quire_operator.cluster.connection import Connection
from quire_operator.cluster.errors import ClusterError, UnreachableError

logger = logging.getLogger(__name__)

_SELECTOR = f"{names.LABEL_ROLE}={names.ROLE_DEMAND}"
# A connection that died unseen is noticed when the watch is late to end: long before requests give up.
_WATCH_SECONDS = 30
_LATE_SECONDS = 5
_GAP_SECONDS = 30.0  # between two renewals of one wait: two gateways write and delete one Lease
_SHORT_SECONDS = 5.0  # a watch that ends sooner was none
_CONNECT_SECONDS = 5
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
_CHUNK_BYTES = 1 << 16


class DemandWatch:
    """`demands` gets when each model was last asked for, in Unix time, and `waits` since when it has been
    without a longer gap; `changed` is called with the model.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        demands: dict[Key, float],
        changed: Callable[[Key], None],
        now: Callable[[], float] = time.time,
        waits: dict[Key, float] | None = None,
    ) -> None:
        self._connection = connection
        self._path = kinds.LEASE.path(namespace)
        self._demands = demands
        self._changed = changed
        self._now = now
        self._waits: dict[Key, float] = {} if waits is None else waits
        self._last: dict[Key, float] = {}  # as `demands`, of those too whose Lease is deleted

    async def run(self) -> None:
        """Until cancelled, whatever the API server does."""
        failures = 0
        while True:
            try:
                version, begun = await self._list(), time.monotonic()
                await self._watch(version)
                if time.monotonic() - begun < _SHORT_SECONDS:
                    raise UnreachableError("the watch of Leases ended at once")
                failures = 0
            # ValueError: a line that is no JSON, cut by a proxy between for example.
            except (ClusterError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.log(
                    logging.INFO if failures else logging.WARNING, "cannot watch for demand: %r", error
                )
                failures += 1
                await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES)) - 1] * random.uniform(0.5, 1.0))

    async def _list(self) -> str:
        answer = await self._connection.request("GET", self._path, query={"labelSelector": _SELECTOR})
        self._demands.clear()
        for lease in answer.get("items") or ():
            self._take(lease, self._renewed_at(lease))
        return str((answer.get("metadata") or {}).get("resourceVersion", ""))

    async def _watch(self, version: str) -> None:
        """Take the events from a version on, until the watch ends."""
        query = {
            "labelSelector": _SELECTOR,
            "resourceVersion": version,
            "watch": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=_WATCH_SECONDS + _LATE_SECONDS, sock_connect=_CONNECT_SECONDS)
        url = f"{self._connection.server}{self._path}"
        async with (
            await self._connection.watch_session() as session,
            session.get(url, params=query, timeout=timeout, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise UnreachableError(f"the watch of Leases: HTTP {answer.status}")
            async for line in answer.content.iter_chunked(_CHUNK_BYTES):
                self._on_event(json.loads(line))

    def _on_event(self, event: Any) -> None:
        if not isinstance(event, dict) or not isinstance(lease := event.get("object"), dict):
            raise ValueError(f"this is no event of a watch: {str(event)[:200]}")
        if event.get("type") == "ERROR":
            raise UnreachableError(f"the watch of Leases: {str(lease.get('message'))[:200]}")
        if event.get("type") == "DELETED":
            self._demands.pop(_model_of(lease), None)
        else:
            self._take(lease, self._now())

    def _take(self, lease: Object, at: float) -> None:
        key = _model_of(lease)
        for one in [one for one, last in self._last.items() if self._now() - last > _GAP_SECONDS]:
            del self._last[one], self._waits[one]
        at = max(at, self._last.get(key, 0.0))  # a list has the gateway's time, which may be behind
        self._demands[key] = self._last[key] = at
        self._waits.setdefault(key, at)
        self._changed(key)

    def _renewed_at(self, lease: Object) -> float:
        """By the gateway's clock, at most now: when it was seen first is not known."""
        try:
            renewed = datetime.fromisoformat(str((lease.get("spec") or {}).get("renewTime"))).timestamp()
        except ValueError:
            return 0.0
        return min(renewed, self._now())


def _model_of(lease: Object) -> Key:
    labels = (lease.get("metadata") or {}).get("labels") or {}
    return Key(str(labels.get(names.LABEL_NAMESPACE, "")), str(labels.get(names.LABEL_NAME, "")))
