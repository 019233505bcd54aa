"""Polls the pods: GET /statusz of those that are not ready every two seconds, and of ready ones once, and
less often while their autoscaler is about to scale down, where they stop for lack of requests, read from
prefill pods, have adapters, or lead a group.

All requests are concurrent with short deadlines. Responses are untrusted input: bounded in size and time
here, validated in `reports`. Only pods that belong to an LLMDeployment by the uids of their owners are asked:
anyone may set its label. A pod whose answer changed puts its LLMDeployment into the queue. Writes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from quire_operator import names, reports
from quire_operator.cluster import Cache, Cluster, Key, Object, kinds, owner_key, version_of
from quire_operator.observed import (
    WORKLOAD_KINDS,
    controller_uid,
    find_workload,
    group_index,
    has_adapters,
    is_about_to_scale_down,
    is_owned,
    may_scale_to_zero,
)
from quire_operator.reports import Sample
from quire_operator.slow_ranks import SlowRank

PERIOD_SECONDS = 2.0
ANSWER_SECONDS = 1.5
CONCURRENCY = 64
ROUNDS_PER_LOAD = 5  # ready pods are polled in every fifth round
_SAME_SECONDS = 2.0  # by which one moment differs when two answers tell of it


@dataclass(frozen=True, kw_only=True)
class _PolledPod:
    """What decides whether a pod is polled."""

    version: int
    owner: Key  # by its label, which everyone who may create a pod can set
    controller: str
    address: str  # empty while no container can answer
    ready: bool
    leads_group: bool


class Poller:
    """`changed` is called with the LLMDeployment of a pod whose answer changed."""

    def __init__(
        self,
        cluster: Cluster,
        changed: Callable[[Key], None],
        *,
        port: int = names.PORT_HEALTH,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._changed = changed
        self._port = port
        self._now = now
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._pods: dict[str, _PolledPod] = {}  # by uid
        # By uid: the version that was read, and the LLMDeployment that it is about to scale down.
        self._autoscalers: dict[str, tuple[int, Key | None]] = {}
        self._models: dict[str, tuple[int, Key | None]] = {}  # likewise, and the one that scales to zero
        self._adapters: dict[str, tuple[int, Key | None]] = {}  # likewise, and the one that has adapters
        self._adapted: set[Key] = set()
        self._counted: set[Key] = set()  # whose requests decide which pod goes first, or that all go
        self._rounds = 0
        self._was_loading: set[str] = set()  # uids: polled once more after they become ready
        self._slow_ranks: dict[str, SlowRank] = {}  # by uid of a leader that is ready
        self._asked: set[str] = set()  # uids: a ready pod is asked once, for what it served before we started

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
        """One round: poll every pod that is due."""
        self._refresh_pods()
        self._rounds += 1
        is_for_all = self._rounds % ROUNDS_PER_LOAD == 0
        always: set[Key] = set()
        if is_for_all:
            cached = self._cluster.cache
            self._counted = _refresh(self._autoscalers, cached, kinds.HPA.kind, is_about_to_scale_down)
            self._counted |= _refresh(self._models, cached, names.KIND, may_scale_to_zero)
            self._adapted = _refresh(self._adapters, cached, names.KIND, has_adapters)
            always = self._counted | self._adapted | self._disaggregated()
        due = [
            (uid, pod)
            for uid, pod in self._pods.items()
            if self._is_due(uid, pod, always) or (is_for_all and pod.leads_group and pod.address)
        ]
        makers = {owner: self._makers(owner) for owner in {pod.owner for _, pod in due}}
        ours = [(uid, pod) for uid, pod in due if pod.controller in makers[pod.owner]]
        await asyncio.gather(*(self._poll_pod(session, uid, pod) for uid, pod in ours))

    def _makers(self, owner: Key) -> set[str]:
        """The uids of the ReplicaSets, Jobs and groups' StatefulSets of an LLMDeployment: their pods are
        asked. Others that only carry its label would take the time of a round, which is everyone's.
        """
        cache = self._cluster.cache
        llm = cache.get(names.KIND, *owner)
        if llm is None:
            return set()
        live = [one for kind in (*WORKLOAD_KINDS, "Job") for one in cache.owned(owner, only=kind)]
        children = [one for one in live if is_owned(one, str(llm["metadata"]["uid"]))]
        has_groups = any(one["kind"] == names.GROUP_KIND for one in children)
        kinds_made = ("ReplicaSet", "Pod") if has_groups else ("ReplicaSet",)
        found = find_workload(children, [one for kind in kinds_made for one in cache.owned(owner, only=kind)])
        jobs = [one for one in children if one["kind"] == "Job"]
        makers = {str(one["metadata"]["uid"]) for one in (*found.replica_sets, *jobs)}
        return makers | {controller_uid(pod) for pod in (*found.pods, *found.workers)}

    def _refresh_pods(self) -> None:
        """Read only the pods that changed since the last round, because there may be thousands."""
        cache, kind = self._cluster.cache, kinds.POD.kind
        for uid in self._pods.keys() - cache.versions(kind).keys():
            del self._pods[uid]
            self._cluster.samples.pop(uid, None)
            self._was_loading.discard(uid)
            self._asked.discard(uid)
            self._slow_ranks.pop(uid, None)
        for body in cache.changed(kind, {uid: pod.version for uid, pod in self._pods.items()}):
            self._pods[str(body["metadata"]["uid"])] = _read(body)

    def _disaggregated(self) -> set[Key]:
        """The LLMDeployments with pods of their own for prefill."""
        return {
            owner
            for owner in {pod.owner for pod in self._pods.values()}
            if self._cluster.cache.has(
                "Deployment", owner.namespace, names.workload(owner.name, names.ROLE_PREFILL)
            )
        }

    def _is_due(self, uid: str, pod: _PolledPod, always: set[Key]) -> bool:
        """`always`: the LLMDeployments whose ready pods are asked in this round, too."""
        if not pod.address:
            return False
        if not pod.ready:
            self._was_loading.add(uid)
            return True
        if pod.owner in always or uid not in self._asked:
            return True
        sample = self._cluster.samples.get(uid)
        if pod.owner in self._adapted and sample is not None and reports.has_unsettled_adapters(sample):
            return True
        return uid in self._was_loading and (
            sample is None or sample.phase != "serving" or bool(sample.reason)
        )

    async def _poll_pod(self, session: aiohttp.ClientSession, uid: str, pod: _PolledPod) -> None:
        self._asked.add(uid)
        async with self._slots:
            sample = await fetch(session, pod.address, self._port)
        if sample is not None and pod.ready and pod.leads_group:
            sample = self._of_group(uid, pod, sample)
        elif sample is not None and pod.ready and self._is_for_adapters_alone(pod):
            # How many requests there are differs in each answer, and changes no status.
            sample = replace(sample, requests=None, seconds_since_request=None)
        sample = self._with_quiet(uid, sample)
        if sample is None:
            return
        before, self._cluster.samples[uid] = self._cluster.samples.get(uid), sample
        if before is None or sample != before or sample.asked_at - before.asked_at > reports.STALE_SECONDS:
            self._changed(pod.owner)

    def _is_for_adapters_alone(self, pod: _PolledPod) -> bool:
        """Whether a ready pod is asked for the sake of its adapters, and its requests decide nothing."""
        return pod.owner in self._adapted and pod.owner not in self._counted

    def _of_group(self, uid: str, pod: _PolledPod, sample: Sample) -> Sample:
        """What a leader says while it serves, with the rank that is slow in place of the numbers of all: they
        are others in each answer, and change no status.
        """
        slow = self._slow_ranks.setdefault(uid, SlowRank())
        slow.take(sample.ranks)
        requests = sample.requests if pod.owner in self._counted else None
        return replace(sample, ranks=(), requests=requests, slow_rank=slow.rank)

    def _with_quiet(self, uid: str, sample: Sample | None) -> Sample | None:
        """The sample with the time of its last request, the same one in each answer while there is no other.
        A pod that does not answer may have had one since.
        """
        before = self._cluster.samples.get(uid)
        if sample is None:
            return None if before is None else replace(before, quiet_since=None)
        seconds, since = sample.seconds_since_request, None
        if seconds is not None and not sample.requests:
            since, known = self._now() - seconds, None if before is None else before.quiet_since
            if known is not None and abs(since - known) < _SAME_SECONDS:
                since = known
        return replace(sample, seconds_since_request=None, quiet_since=since, asked_at=self._now())


def _refresh(
    known: dict[str, tuple[int, Key | None]], cache: Cache, kind: str, matches: Callable[[Object], bool]
) -> set[Key]:
    """The LLMDeployments of the objects that match. ``known``: by UID the version that was read, and what it
    said, so that only what has changed since is read.
    """
    for uid in known.keys() - cache.versions(kind).keys():
        del known[uid]
    for body in cache.changed(kind, {uid: version for uid, (version, _) in known.items()}):
        owner = owner_key(body) if matches(body) else None
        known[str(body["metadata"]["uid"])] = (version_of(body), owner)
    return {owner for _, owner in known.values() if owner is not None}


async def fetch(session: aiohttp.ClientSession, address: str, port: int) -> Sample | None:
    """The pod's answer, None for none or an invalid one."""
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


def _read(body: Object) -> _PolledPod:
    status = body.get("status") or {}
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    labels = body["metadata"].get("labels") or {}
    can_answer = _is_running(status) and "deletionTimestamp" not in body["metadata"]
    return _PolledPod(
        version=version_of(body),
        owner=owner_key(body),
        controller=controller_uid(body),
        address=str(status.get("podIP") or "") if can_answer else "",
        # A download pod has no readiness probe, so Kubernetes always reports it as ready.
        ready=conditions.get("Ready") == "True" and not _is_download_pod(body),
        leads_group=group_index(body) >= 0 and labels.get(names.LABEL_ROLE) != names.ROLE_WORKER,
    )


def _is_download_pod(body: Object) -> bool:
    """Whether it is a pod of the download Job."""
    labels = body["metadata"].get("labels") or {}
    return labels.get(names.LABEL_ROLE) == names.ROLE_FETCHER


def _is_running(status: Object) -> bool:
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return any(
        container.get("name") in (names.FETCHER, names.CONTAINER)
        and "running" in (container.get("state") or {})
        for container in containers
    )
