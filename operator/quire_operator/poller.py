"""Asks pods that are not ready how they are: GET /statusz every two seconds, all at once, each with a short
deadline; and ready ones how busy they are, more seldom, while an autoscaler is about to take one away.

Run by the controller. The answers are hostile input: bounded here in size and time, checked in `reports`. A
pod that answers differently than before puts its LLMDeployment into the queue. Knows no status and writes
nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from quire_operator import names, reports
from quire_operator.cluster import Cluster, Key, Object, kinds, owner_key, version_of
from quire_operator.observed import is_shrinking
from quire_operator.reports import Sample

PERIOD_SECONDS = 2.0
ANSWER_SECONDS = 1.5
CONCURRENCY = 64
ROUNDS_PER_LOAD = 5  # a pod that is about to be marked is asked in one round of so many


@dataclass(frozen=True, kw_only=True)
class _Pod:
    """What decides whether a pod is asked."""

    version: int
    owner: Key
    address: str  # empty while it cannot answer
    ready: bool


class Poller:
    """`changed` is called with the LLMDeployment of a pod that has something new to say."""

    def __init__(
        self, cluster: Cluster, changed: Callable[[Key], None], *, port: int = names.PORT_HEALTH
    ) -> None:
        self._cluster = cluster
        self._changed = changed
        self._port = port
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._pods: dict[str, _Pod] = {}  # by uid
        # By uid: the version that was looked at, and whose pods it is about to take away.
        self._autoscalers: dict[str, tuple[int, Key | None]] = {}
        self._rounds = 0
        self._was_loading: set[str] = set()  # uids: these are asked once more when they have become ready

    async def run(self) -> None:
        """Poll until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(
            timeout=timeout, auto_decompress=False, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                await self.poll(session)
                await asyncio.sleep(PERIOD_SECONDS)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Ask every pod once that has something to tell."""
        self._look()
        self._rounds += 1
        near = self._about_to_shrink() if self._rounds % ROUNDS_PER_LOAD == 0 else set()
        asked = [(uid, pod) for uid, pod in self._pods.items() if self._is_asked(uid, pod, near)]
        await asyncio.gather(*(self._ask(session, uid, pod) for uid, pod in asked))

    def _look(self) -> None:
        """Read the pods that changed: most never do, and there may be thousands."""
        cache, kind = self._cluster.cache, kinds.POD.kind
        for uid in self._pods.keys() - cache.versions(kind).keys():
            del self._pods[uid]
            self._cluster.samples.pop(uid, None)
            self._was_loading.discard(uid)
        for body in cache.changed(kind, {uid: pod.version for uid, pod in self._pods.items()}):
            self._pods[str(body["metadata"]["uid"])] = _read(body)

    def _about_to_shrink(self) -> set[Key]:
        """The LLMDeployments whose autoscaler is about to take a pod away."""
        cache, kind = self._cluster.cache, kinds.HPA.kind
        for uid in self._autoscalers.keys() - cache.versions(kind).keys():
            del self._autoscalers[uid]
        known = {uid: version for uid, (version, _) in self._autoscalers.items()}
        for body in cache.changed(kind, known):
            owner = owner_key(body) if is_shrinking(body) else None
            self._autoscalers[str(body["metadata"]["uid"])] = (version_of(body), owner)
        return {owner for _, owner in self._autoscalers.values() if owner is not None}

    def _is_asked(self, uid: str, pod: _Pod, near: set[Key]) -> bool:
        if not pod.address:
            return False
        if not pod.ready:
            self._was_loading.add(uid)
            return True
        if pod.owner in near:
            return True
        sample = self._cluster.samples.get(uid)
        return uid in self._was_loading and (
            sample is None or sample.phase != "serving" or bool(sample.reason)
        )

    async def _ask(self, session: aiohttp.ClientSession, uid: str, pod: _Pod) -> None:
        async with self._slots:
            sample = await fetch(session, pod.address, self._port)
        if sample is not None and sample != self._cluster.samples.get(uid):
            self._cluster.samples[uid] = sample
            self._changed(pod.owner)


async def fetch(session: aiohttp.ClientSession, address: str, port: int) -> Sample | None:
    """The pod's answer, None for none that can be believed."""
    try:
        host = ipaddress.ip_address(address)
        url = f"http://[{host}]:{port}/statusz" if host.version == 6 else f"http://{host}:{port}/statusz"
        async with session.get(url, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as answer:
            if answer.status != 200:
                return None
            raw = await answer.content.read(reports.MAX_STATUSZ_BYTES + 1)
            while len(raw) <= reports.MAX_STATUSZ_BYTES and not answer.content.at_eof():
                raw += await answer.content.read(reports.MAX_STATUSZ_BYTES + 1)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return reports.parse_statusz(raw)


def _read(body: Object) -> _Pod:
    status = body.get("status") or {}
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    can_answer = _is_running(status) and "deletionTimestamp" not in body["metadata"]
    return _Pod(
        version=version_of(body),
        owner=owner_key(body),
        address=str(status.get("podIP") or "") if can_answer else "",
        # Nothing asks a pod that only fetches whether it is ready, so it always is.
        ready=conditions.get("Ready") == "True" and not _fetches(body),
    )


def _fetches(body: Object) -> bool:
    """Whether it is the pod that fills a shared claim."""
    labels = body["metadata"].get("labels") or {}
    return labels.get(names.LABEL_ROLE) == names.ROLE_FETCHER


def _is_running(status: Object) -> bool:
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return any(
        container.get("name") in (names.FETCHER, names.CONTAINER)
        and "running" in (container.get("state") or {})
        for container in containers
    )
