"""The only module that speaks to the API server: observe, execute, write the status, tell an Event.

Called by reconcile and the handlers. It decides nothing: it reads into frozen values and carries out plans.
Each write first asks the fence whether this process still leads. Plain dicts throughout; one field manager
for everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from quire_operator import names
from quire_operator.cluster import events, kinds
from quire_operator.cluster.cache import Cache, Changes, Key, Listing, Object, owner_key, version_of
from quire_operator.cluster.connection import APPLY, MERGE_PATCH, Access, Connection
from quire_operator.cluster.errors import (
    ClusterError,
    ConflictError,
    FailedError,
    ForbiddenError,
    NotFoundError,
    PredecessorError,
    QuotaExceededError,
    RejectedError,
    UnreachableError,
)
from quire_operator.cluster.kinds import Kind
from quire_operator.cluster.leases import LeaseClient
from quire_operator.cluster.reads import Reads
from quire_operator.cluster.renders import Renders
from quire_operator.observed import (
    Body,
    Observed,
    Ref,
    controller_uid,
    is_made_by_keda,
    is_ours,
    ref,
    scales_deployment,
    workload,
)
from quire_operator.plan import Plan
from quire_operator.reports import Sample
from quire_operator.status.model_cache import awaits_pods
from quire_operator.status.pods import awaits_volumes
from quire_operator.status.transitions import Event

__all__ = [
    "Access",
    "Cache",
    "Changes",
    "Cluster",
    "ClusterError",
    "ConflictError",
    "Connection",
    "FailedError",
    "ForbiddenError",
    "Key",
    "Kind",
    "LeaseClient",
    "NotFoundError",
    "Object",
    "PredecessorError",
    "QuotaExceededError",
    "RejectedError",
    "UnreachableError",
    "kinds",
    "owner_key",
    "version_of",
]


class Cluster:
    """`fence` raises when this process must not write (any more)."""

    def __init__(self, connection: Connection, *, fence: Callable[[], None], instance: str) -> None:
        self._connection = connection
        self._reads = Reads(connection)
        self._fence = fence
        self._instance = instance
        self.cache = Cache()
        self._renders = Renders()
        self._unlisted: set[str] = set()  # kinds of which the cache may not know all
        self.samples: dict[str, Sample] = {}  # by pod uid; the poller keeps it

    async def relist(self, kind: Kind, namespaces: Sequence[str]) -> Changes:
        """Read all objects of `kind` in these namespaces (none named: all) and mend the cache with them;
        ForbiddenError without the right to.
        """
        listing = Listing(self.cache, kind.kind)
        try:
            for namespace in namespaces or ("",):
                async for page, version in self._reads.pages(kind, namespace):
                    listing.add(page, version)
        except ForbiddenError:
            self._unlisted.add(kind.kind)
            raise
        except NotFoundError:
            if not kind.optional:
                raise
            return self.cache.clear(kind.kind)  # its CRD is not there, and took its objects along
        self._unlisted.discard(kind.kind)
        changes = listing.finish()
        if kind == kinds.REVISION:
            self._renders.keep(self.cache.versions(kind.kind))
        return changes

    def revisions(self, body: Body) -> list[Object]:
        """The ControllerRevisions that the LLMDeployment owns, without what they keep."""
        owned = self.cache.owned(owner_key(dict(body)), only="ControllerRevision")
        return [revision for revision in owned if controller_uid(revision) == _uid(body)]

    async def kept(self, namespace: str, name: str) -> Any:
        """What a ControllerRevision keeps; None when it is gone. It never changes: it is read once."""
        known = self.cache.get(kinds.REVISION.kind, namespace, name)
        if known is not None and (data := self._renders.get(owner_key(known), _uid(known))) is not None:
            return data
        revision = await self._reads.one(kinds.REVISION, namespace, name)
        if revision is None:
            return None
        self._renders.put(owner_key(revision), _uid(revision), revision.get("data"))
        return revision.get("data")

    async def profile(self, name: str) -> Object | None:
        """The AcceleratorProfile, None where there is none; RejectedError without the right to read it."""
        return await self._reads.one(kinds.PROFILE, "", name)

    async def observe(self, body: Body, wanted: Iterable[Ref] = ()) -> Observed:
        """The LLMDeployment's objects from the cache; what is wanted and not there is looked up by name."""
        key = owner_key(dict(body))
        uid = str(body["metadata"]["uid"])
        children: dict[Ref, Body] = {}
        foreign: list[Ref] = []
        missing: set[str] = set()
        forbidden: dict[str, str] = {}
        autoscalers: list[Body] = []
        mine = {kind.kind for kind in kinds.CHILDREN}
        related = list(self.cache.owned(key, but="ControllerRevision"))
        for live in related:
            if live["kind"] in mine and is_ours(live, uid):
                children[ref(live)] = live
            elif scales_deployment(live, key.name):
                autoscalers.append(live)
        for target in wanted:
            kind = kinds.BY_NAME[target.kind]
            is_known = not kind.optional and kind.kind not in self._unlisted
            if is_known and target in children:
                continue
            try:
                found = await self._reads.one(kind, key.namespace, target.name)
            except ForbiddenError as error:
                if not kind.on_demand:
                    raise
                forbidden[kind.kind] = str(error)
                continue
            if not is_known:
                self._forget_old(children.pop(target, None), found)
            if kind.optional and found is None and not await self._reads.is_installed(kind):
                missing.add(kind.kind)
            if found is not None and is_ours(found, uid):
                self.cache.put(found)
                children[target] = found
            elif found is not None:
                _refuse_predecessor(found, key)
                foreign.append(target)
        sets, pods, fetchers = workload(children.values(), related)
        everybody = (*pods, *fetchers)
        return Observed(
            body=body,
            children=children,
            foreign=tuple(foreign),
            rivals=tuple(live for live in autoscalers if not is_made_by_keda(live, key.name)),
            made_by_keda=next((live for live in autoscalers if is_made_by_keda(live, key.name)), None),
            missing=frozenset(missing),
            forbidden=forbidden,
            replica_sets=tuple(sets),
            pods=tuple(pods),
            fetchers=tuple(fetchers),
            samples={uid: self.samples[uid] for pod in everybody if (uid := _uid(pod)) in self.samples},
            job_error=await self._job_error(children.values(), fetchers, key.namespace),
            mount_errors=await self._mount_errors(everybody, key.namespace),
        )

    async def _mount_errors(self, pods: Sequence[Body], namespace: str) -> dict[str, str]:
        """What the kubelet's FailedMount Events say, by pod uid; asked only for pods that seem to wait."""
        waiting = [_uid(pod) for pod in pods if awaits_volumes(pod, datetime.now(UTC))]
        told = {uid: await self._reads.told("FailedMount", uid, namespace) for uid in waiting}
        return {uid: error for uid, error in told.items() if error}

    async def _job_error(self, children: Iterable[Body], fetchers: Sequence[Body], namespace: str) -> str:
        """Why a Job that seems to wait gets no pod, in its controller's words."""
        now = datetime.now(UTC)
        jobs = [child for child in children if child["kind"] == "Job" and awaits_pods(child, fetchers, now)]
        told = [await self._reads.told("FailedCreate", _uid(job), namespace) for job in jobs]
        return next(filter(None, told), "")

    async def execute(self, plan: Plan, namespace: str) -> None:
        """Carry out a plan: say what is to be kept, retire autoscalers, apply in order, delete, mark pods."""
        for revision in plan.revise:
            document = {
                "metadata": {"uid": revision.uid, "annotations": dict(revision.annotations)},
                "revision": revision.number,
            }
            path = kinds.REVISION.path(namespace, revision.name)
            self.cache.put(await self._write("PATCH", path, body=document, content_type=MERGE_PATCH))
        for target, uid in plan.retire:
            await self._delete(target, namespace, uid)
        for manifest in plan.apply:
            await self._apply(manifest)
        for target, uid in plan.delete:
            await self._delete(target, namespace, uid)
        for pod in plan.mark:
            patch = {"metadata": {"uid": pod.uid, "annotations": dict(pod.annotations)}}
            path = kinds.POD.path(namespace, pod.name)
            marked = await self._ignoring_absence(
                self._write("PATCH", path, body=patch, content_type=MERGE_PATCH)
            )
            if marked is not None:
                self.cache.put(marked)

    async def patch_status(self, body: Body, patch: dict[str, Any]) -> None:
        """Merge `patch` into the status, if the object is still as it was read."""
        metadata = body["metadata"]
        path = kinds.LLM_DEPLOYMENT.path(metadata["namespace"], metadata["name"], "status")
        document = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": patch}
        answer = await self._write("PATCH", path, body=document, content_type=MERGE_PATCH)
        self.cache.put(answer)

    async def refresh(self, key: Key) -> None:
        """Read again what is only written as it was read, after a conflict."""
        for kind in (kinds.LLM_DEPLOYMENT, kinds.DEPLOYMENT):
            live = await self._reads.one(kind, key.namespace, key.name)
            if live is not None:
                self.cache.put(live)

    async def tell(self, body: Body, event: Event) -> None:
        """Create an Event about the LLMDeployment."""
        document = events.document(body, event, instance=self._instance)
        await self._write("POST", kinds.EVENT.path(body["metadata"]["namespace"]), body=document)

    async def _apply(self, manifest: Object) -> None:
        metadata = manifest["metadata"]
        path = kinds.BY_NAME[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        answer = await self._write("PATCH", path, query=query, body=manifest, content_type=APPLY)
        self.cache.put(answer)

    async def _delete(self, target: Ref, namespace: str, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        kind = kinds.BY_NAME[target.kind]
        path = kind.path(namespace, target.name)
        await self._ignoring_absence(self._write("DELETE", path, body=options))
        if not kind.is_watched:
            known = self.cache.get(kind.kind, namespace, target.name)
            self._forget_old(known, found := await self._reads.one(kind, namespace, target.name))
            if known is not None and found is not None and _uid(found) == uid:
                self.cache.put(found)

    async def _write(self, method: str, path: str, **arguments: Any) -> Object:
        self._fence()
        return await self._connection.request(method, path, **arguments)

    async def _ignoring_absence(self, write: Awaitable[Object]) -> Object | None:
        """A deleted or replaced object needs no further deletion or mark."""
        try:
            return await write
        except (NotFoundError, ConflictError):
            return None

    def _forget_old(self, known: Body | None, found: Body | None) -> None:
        """What was `known` by a name is not what is found there now, or nothing is."""
        if known is not None and (found is None or _uid(found) != _uid(known)):
            self.cache.remove(dict(known))


def _uid(body: Body) -> str:
    return str(body["metadata"]["uid"])


def _refuse_predecessor(live: Body, key: Key) -> None:
    for owner in live["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and (owner.get("kind"), owner.get("name")) == (names.KIND, key.name):
            raise PredecessorError(f"{ref(live)} of the deleted {key.name} is not collected yet")
