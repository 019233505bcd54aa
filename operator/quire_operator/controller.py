"""The controller of the leading process: watch events into the work queue, workers that reconcile, periodic
re-lists.

A lost event costs time and not correctness: a re-list finds what the watches missed, corrects the cache and
enqueues every LLMDeployment. Knows no kopf.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from functools import partial

from quire_operator import names
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
from quire_operator.watch_health import WatchHealth
from quire_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

WORKERS = 16
CONFIRM_SECONDS = 30.0  # until the next re-list where a watch seems to have missed an event
EVENT_LATENCY_SECONDS = 20.0  # a watch that is later than this, less than CONFIRM_SECONDS, is stale
# A change of a pod is followed by changes of its ReplicaSet and of the Deployment's status, whose events may
# arrive in any order: this delay combines them into one reconcile and one status write.
FOLLOW_SECONDS = 0.2
GAP_SECONDS = 1.0  # watches that were interrupted together restart one after another
RECONCILE_SECONDS = 60.0
CONFLICT_SECONDS = 0.2
# Such failures come from the API server and not from the object, so the back-off stays short.
OUTAGE_BACKOFF_SECONDS = 10.0
PRIME_RETRY_SECONDS = 2.0


class Controller:
    """Work queue, workers, re-list and poller around one cluster."""

    def __init__(self, cluster: Cluster, settings: Settings, metrics: Metrics) -> None:
        self._cluster = cluster
        self._settings = settings
        self._metrics = metrics
        self._reconcile = Reconciler(cluster, settings)
        self._queue: WorkQueue[Key] = WorkQueue(asyncio.get_running_loop(), group=self._pool_of)
        self._poller = Poller(cluster, self._queue.add)
        self._watch_health = WatchHealth(EVENT_LATENCY_SECONDS)
        self._interrupted = asyncio.Event()
        self._forbidden: set[str] = set()
        metrics.queue_depth.set_function(lambda: self._queue.depth)
        metrics.queue_oldest_seconds.set_function(lambda: self._queue.oldest_age)
        for kind in kinds.WATCHED:
            metrics.watch_stale.labels(kind.kind).set_function(partial(self._is_stale, kind.kind))

    def on_event(self, event: str | None, body: Object) -> None:
        """Put the object of a watch event into the cache, and enqueue its LLMDeployment if it changed. No
        exception leaves it: one object concerns nothing but itself.
        """
        try:
            self._on_event(event, body)
        except Exception as error:
            self._cluster.report(body, f"{type(error).__name__}: {error}")

    def _on_event(self, event: str | None, body: Object) -> None:
        kind, uid = str(body["kind"]), str(body["metadata"]["uid"])
        self._metrics.watch_last_event.labels(kind).set(time.time())
        if event == "DELETED":
            self._watch_health.on_delete(kind, uid)
            self._cluster.cache.remove(body)
            self._queue.add(owner_key(body))
            return
        if event is None and self._watch_health.has_seen(kind, uid):
            self._interrupted.set()
        self._watch_health.on_event(kind, uid, version_of(body))
        # The results of our own writes are in the cache already, so their events cause no reconcile.
        if not self._cluster.cache.put(body):
            return
        if _is_consequence(kind, body):
            self._queue.add_after(owner_key(body), FOLLOW_SECONDS)
        else:
            self._queue.add(owner_key(body))

    def _pool_of(self, key: Key) -> Key | None:
        """The pool of which one member at a time is reconciled: two that each see the other one stopped would
        both start.
        """
        name = self._cluster.cache.pool_of(key)
        return Key(key.namespace, name) if name else None

    def _wake(self, key: Key) -> None:
        """Requests wait for a model."""
        if self._cluster.cache.has(names.KIND, *key):
            self._queue.add(key)

    def health(self) -> str:
        """What is wrong with the watches, or "". An unreachable API server is not reported: a restart would
        not help.
        """
        stale = ", ".join(self._watch_health.stale)
        return f"watches deliver no events any more: {stale}" if stale else ""

    def _is_stale(self, kind: str) -> bool:
        return kind in self._watch_health.stale

    async def prime(self) -> None:
        """Fill the cache before the first reconcile; waits for the API server and for the CRD."""
        while True:
            self._watch_health.reset()  # they only start now: earlier lists prove nothing
            try:
                await self._resync()
                return
            except ClusterError as error:
                logger.warning("cannot list yet: %s", error)
                await asyncio.sleep(PRIME_RETRY_SECONDS)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poller.run())
            if self._settings.gateway_namespaces:
                tasks.create_task(self._cluster.watch_demands(self._settings.operator_namespace, self._wake))
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
                await asyncio.sleep(
                    0
                )  # a reconcile without I/O never yields, and a thousand of them take seconds
            finally:
                self._queue.done(key)

    async def _attempt(self, key: Key) -> str:
        """One reconcile; no exception leaves it, so that one bad object never stops a worker."""
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                result = await self._reconcile(key)
        except ConflictError:
            return await self._after_conflict(key)
        except (QuireOperatorError, TimeoutError) as error:
            delay = self._queue.retry(key, most=OUTAGE_BACKOFF_SECONDS)
            logger.warning("%s/%s: %s; retry in %.0f s", key.namespace, key.name, error, delay)
            return "error"
        except Exception:
            delay = self._queue.retry(key)
            logger.exception("%s/%s: unexpected error; retry in %.0f s", key.namespace, key.name, delay)
            return "bug"
        self._metrics.set_ready(*key, result.ready)
        self._metrics.set_cost(*key, result.cost_per_hour)
        self._queue.forget(key)
        for repaired in result.plan.repairs:
            self._metrics.conflicts.labels(repaired.kind).inc()
        for other in result.others:
            self._queue.add_after(other, FOLLOW_SECONDS)
        if result.swap is not None:
            pool, seconds = result.swap
            self._metrics.swap_seconds.labels(key.namespace, pool).observe(seconds)
        if result.requeue_after is not None:
            self._queue.add_after(key, result.requeue_after)
        return "changed" if result.plan else "unchanged"

    async def _after_conflict(self, key: Key) -> str:
        """Another client wrote the LLMDeployment in between: read it again and retry."""
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
            if self._watch_health.has_unconfirmed:
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
                logger.warning("re-list failed, will be tried again: %s", error)

    async def _resync(self) -> None:
        """List everything, correct the cache, enqueue every LLMDeployment."""
        for kind in kinds.CACHED:
            try:
                changes = await self._cluster.relist(kind, self._settings.watch_namespaces)
            except ForbiddenError as error:
                if not kind.on_demand:
                    raise
                if kind.kind not in self._forbidden:
                    logger.warning("LLMDeployments that need a %s have to wait: %s", kind.kind, error)
                self._forbidden.add(kind.kind)
                continue
            self._forbidden.discard(kind.kind)
            for owner in changes.owners:
                self._queue.add(owner)
            if not kind.is_watched:
                continue
            if changes.removed:
                logger.info("the watch missed %d deletions of %s", changes.removed, kind.plural)
            versions = self._cluster.cache.versions(kind.kind)
            self._watch_health.on_relist(kind.kind, changes.missed, versions, time.monotonic())
            if self._is_stale(kind.kind):
                logger.error(
                    "the watch of %s delivers no events any more; the liveness probe fails", kind.plural
                )
        for key in self._cluster.cache.llm_deployments():
            self._queue.add(key, background=True)


def _is_consequence(kind: str, body: Object) -> bool:
    """Whether the event follows from an earlier change (a pod, a ReplicaSet, a Deployment's status) and can
    wait for related ones. An edit of a Deployment's spec is reconciled at once.
    """
    if kind == kinds.DEPLOYMENT.kind:
        seen = (body.get("status") or {}).get("observedGeneration")
        return seen is not None and bool(seen == body["metadata"].get("generation"))
    return kind in (kinds.POD.kind, kinds.REPLICA_SET.kind)
