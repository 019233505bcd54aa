"""The working part of a leading process: events into the queue, workers out of it, a full re-list now and
then.

Started by the handlers once the Lease is held. A lost event costs time and not correctness: the re-list
finds what the watches missed, mends the cache and puts every LLMDeployment into the queue. Knows kopf as
little as kopf knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from functools import partial

from quire_operator.cluster import (
    Cluster,
    ClusterError,
    ConflictError,
    ForbiddenError,
    Key,
    Object,
    kinds,
    owner_key,
    version_of,
)
from quire_operator.errors import QuireOperatorError
from quire_operator.metrics import Metrics
from quire_operator.poller import Poller
from quire_operator.reconcile import Reconciler
from quire_operator.settings import Settings
from quire_operator.watches import Watches
from quire_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

WORKERS = 16
CONFIRM_SECONDS = 30.0  # a watch that seems to have missed something is checked again this soon
TELL_SECONDS = 10.0  # and if it has not told it then, and this long, it is stale
# A change of a pod is followed by one of its ReplicaSet and of the Deployment's status, and their watches may
# tell it in another order: all are worth one look and one write of the status.
FOLLOW_SECONDS = 0.2
GAP_SECONDS = 1.0  # watches that were interrupted together begin again one after another
RECONCILE_SECONDS = 60.0
CONFLICT_SECONDS = 0.2
# Such failures are the API server's and not the object's: when it is back, nobody waits for minutes.
OUTAGE_BACKOFF_SECONDS = 10.0
PRIME_RETRY_SECONDS = 2.0


class Controller:
    """Queue, workers, re-list and poller around one cluster."""

    def __init__(self, cluster: Cluster, settings: Settings, metrics: Metrics) -> None:
        self._cluster = cluster
        self._settings = settings
        self._metrics = metrics
        self._reconcile = Reconciler(cluster, settings)
        self._queue: WorkQueue[Key] = WorkQueue(asyncio.get_running_loop())
        self._poller = Poller(cluster, self._queue.add)
        self._watches = Watches(TELL_SECONDS)
        self._interrupted = asyncio.Event()
        self._forbidden: set[str] = set()
        metrics.queue_depth.set_function(lambda: self._queue.depth)
        metrics.queue_oldest_seconds.set_function(lambda: self._queue.oldest_age)
        for kind in kinds.WATCHED:
            metrics.watch_stale.labels(kind.kind).set_function(partial(self._is_stale, kind.kind))

    def on_event(self, event: str | None, body: Object) -> None:
        """A watch told of an object: remember it, and look at its LLMDeployment if it is news."""
        kind, uid = str(body["kind"]), str(body["metadata"]["uid"])
        self._metrics.watch_last_event.labels(kind).set(time.time())
        if event == "DELETED":
            self._watches.told_gone(kind, uid)
            self._cluster.cache.remove(body)
            self._queue.add(owner_key(body))
            return
        if event is None and self._watches.has_told(kind, uid):
            self._interrupted.set()
        self._watches.told(kind, uid, version_of(body))
        # Our own writes are in the cache already: their echo is no news and causes no work.
        if not self._cluster.cache.put(body):
            return
        if _comes_with_others(kind, body):
            self._queue.add_after(owner_key(body), FOLLOW_SECONDS)
        else:
            self._queue.add(owner_key(body))

    def health(self) -> str:
        """What is wrong with the watches, or nothing. An API server that is away is no fault of ours."""
        stale = ", ".join(self._watches.stale)
        return f"watches tell nothing any more: {stale}" if stale else ""

    def _is_stale(self, kind: str) -> bool:
        return kind in self._watches.stale

    async def prime(self) -> None:
        """Fill the cache before anything is decided from it; waits for the API server and for the CRD."""
        while True:
            self._watches.restarted()  # they begin only now, so that a second try says nothing of them
            try:
                await self._resync()
                return
            except ClusterError as error:
                logger.warning("cannot list yet: %s", error)
                await asyncio.sleep(PRIME_RETRY_SECONDS)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poller.run())
            tasks.create_task(self._resync_forever())
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            try:
                with self._metrics.reconcile_seconds.time():
                    result = await self._attempt(key)
                self._metrics.reconciles.labels(result).inc()
                await asyncio.sleep(0)  # a look that finds nothing waits for nothing; a thousand are seconds
            finally:
                self._queue.done(key)

    async def _attempt(self, key: Key) -> str:
        """One reconcile; whatever it raises ends here, so that one bad object never stops a worker."""
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                outcome = await self._reconcile(key)
        except ConflictError:
            return await self._after_conflict(key)
        except (QuireOperatorError, TimeoutError) as error:
            delay = self._queue.retry(key, most=OUTAGE_BACKOFF_SECONDS)
            logger.warning("%s/%s: %s; again in %.0f s", key.namespace, key.name, error, delay)
            return "error"
        except Exception:
            delay = self._queue.retry(key)
            logger.exception("%s/%s: unexpected; again in %.0f s", key.namespace, key.name, delay)
            return "bug"
        self._metrics.tell_ready(*key, outcome.ready)
        self._queue.forget(key)
        for repaired in outcome.plan.repairs:
            self._metrics.conflicts.labels(repaired.kind).inc()
        if outcome.again_after is not None:
            self._queue.add_after(key, outcome.again_after)
        return "changed" if outcome.plan else "unchanged"

    async def _after_conflict(self, key: Key) -> str:
        """Somebody wrote the LLMDeployment meanwhile: read it and begin again."""
        try:
            await self._cluster.refresh(key)
            self._queue.add_after(key, CONFLICT_SECONDS)
        except ClusterError as error:
            logger.warning("%s/%s: %s", key.namespace, key.name, error)
            self._queue.retry(key)
        return "conflict"

    async def _resync_forever(self) -> None:
        while True:
            period = float(self._settings.resync_seconds)
            if self._watches.in_doubt:
                period = min(period, CONFIRM_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period * random.uniform(0.8, 1.2)):
                    await self._interrupted.wait()
                    await asyncio.sleep(GAP_SECONDS)
            self._interrupted.clear()
            try:
                await self._resync()
                self._metrics.resyncs.labels("ok").inc()
            except ClusterError as error:
                self._metrics.resyncs.labels("error").inc()
                logger.warning("re-list failed, the next one will do: %s", error)

    async def _resync(self) -> None:
        """List everything, mend the cache, look at every LLMDeployment."""
        for kind in kinds.CACHED:
            try:
                changes = await self._cluster.relist(kind, self._settings.watch_namespaces)
            except ForbiddenError as error:
                if not kind.on_demand:
                    raise
                if kind.kind not in self._forbidden:
                    logger.warning("LLMDeployments that ask for a %s have to wait: %s", kind.kind, error)
                self._forbidden.add(kind.kind)
                continue
            self._forbidden.discard(kind.kind)
            for owner in changes.owners:
                self._queue.add(owner)
            if not kind.is_watched:
                continue
            if changes.removed:
                logger.info("the watch had missed %d deletions of %s", changes.removed, kind.plural)
            versions = self._cluster.cache.versions(kind.kind)
            self._watches.listed(kind.kind, changes.missed, versions, time.monotonic())
            if self._is_stale(kind.kind):
                logger.error("the watch of %s tells nothing any more; the liveness probe fails", kind.plural)
        for key in self._cluster.cache.llm_deployments():
            self._queue.add(key, background=True)


def _comes_with_others(kind: str, body: Object) -> bool:
    """Whether it is what became of a change and not the change: an edit of a Deployment is mended at once."""
    if kind == kinds.DEPLOYMENT.kind:
        seen = (body.get("status") or {}).get("observedGeneration")
        return seen is not None and bool(seen == body["metadata"].get("generation"))
    return kind in (kinds.POD.kind, kinds.REPLICA_SET.kind)
