"""Reads the live cluster into frozen values, and executes plans: the operator's client of the API server.

Decides nothing. Each write first checks the fence, that is whether this process still leads. Plain dicts
throughout, one field manager for everything.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from quire_operator import names
from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Cache, Changes, Key, Listing, Object, owner_key
from quire_operator.cluster.connection import APPLY, MERGE_PATCH, Connection
from quire_operator.cluster.demands import DemandWatch
from quire_operator.cluster.errors import ConflictError, ForbiddenError, NotFoundError, PredecessorError
from quire_operator.cluster.kinds import Kind
from quire_operator.cluster.object_reader import ObjectReader
from quire_operator.cluster.revision_cache import RevisionCache
from quire_operator.observed import (
    NEED_A_POD,
    Body,
    Observed,
    Ref,
    controller_uid,
    find_workload,
    has_ended,
    is_keda_autoscaler,
    is_owned,
    ref,
    scales_workload,
)
from quire_operator.plan import FieldPath, Plan, managed_fields
from quire_operator.reports import Sample
from quire_operator.resources import Reference
from quire_operator.status.model_cache import awaits_pods
from quire_operator.status.pods import awaits_volumes
from quire_operator.status.transitions import Event


class Cluster:
    """`fence` raises when this process does not lead, and so must not write. `instance`: reported in
    Events.
    """

    def __init__(self, connection: Connection, *, fence: Callable[[], None], instance: str) -> None:
        self._connection = connection
        self._reader = ObjectReader(connection)
        self._fence = fence
        self._instance = instance
        self.report = connection.report
        self.cache = Cache()
        self._revision_cache = RevisionCache()
        self._unlisted: set[str] = set()  # kinds whose objects the cache may not have in full
        self.samples: dict[str, Sample] = {}  # by pod uid, written by the poller
        self.demands: dict[Key, float] = {}  # when requests waited last, in Unix time; by the demand watch
        self.waits: dict[Key, float] = {}  # since when they wait; likewise

    async def watch_demands(self, namespace: str, changed: Callable[[Key], None]) -> None:
        """Keep `demands` up to date, until cancelled. `changed` is called with each model that is asked
        for.
        """
        await DemandWatch(self._connection, namespace, self.demands, changed, waits=self.waits).run()

    def sharing(self, pool: Key, is_lost: Callable[[Body], bool]) -> tuple[list[Observed], bool]:
        """The LLMDeployments that share an accelerator, as the cache has them, without autoscalers and what
        is only read on demand; and whether there are pods of the pool that belong to none of them, and are
        not lost. `pool`: its namespace and name.
        """
        found = list(self.cache.in_pool(pool))
        members = [self._from_cache(body) for body in found if body["kind"] == names.KIND]
        known = {_uid(pod) for one in members for pod in one.pods}
        pods = [body for body in found if body["kind"] == "Pod" and not has_ended(body)]
        pods = [pod for pod in pods if not is_lost(pod)]
        return members, any(_uid(pod) not in known for pod in pods)

    def _from_cache(self, body: Object) -> Observed:
        key, uid = owner_key(body), _uid(body)
        related = list(self.cache.owned(key, but="ControllerRevision"))
        mine = {kind.kind for kind in kinds.CHILDREN}
        children = {ref(live): live for live in related if live["kind"] in mine and is_owned(live, uid)}
        workload = find_workload(list(children.values()), related)
        return Observed(
            body=body,
            children=children,
            replica_sets=workload.replica_sets,
            pods=workload.pods,
            samples={pod: self.samples[pod] for pod in map(_uid, workload.pods) if pod in self.samples},
            demanded_at=self.demands.get(key, 0.0),
        )

    async def relist(self, kind: Kind, namespaces: Sequence[str]) -> Changes:
        """List all objects of `kind` in these namespaces (none given: all) and correct the cache. Raises
        ForbiddenError without the right to list them.
        """
        listing = Listing(self.cache, kind.kind, self.report)
        try:
            for namespace in namespaces or ("",):
                async for page, version in self._reader.pages(kind, namespace):
                    listing.add(page, version)
        except ForbiddenError:
            self._unlisted.add(kind.kind)
            raise
        except NotFoundError:
            if not kind.optional:
                raise
            return self.cache.clear(kind.kind)  # without its CRD there are no objects either
        self._unlisted.discard(kind.kind)
        changes = listing.finish()
        if kind == kinds.REVISION:
            self._revision_cache.keep(self.cache.versions(kind.kind))
        return changes

    def revisions(self, body: Body) -> list[Object]:
        """The ControllerRevisions that the LLMDeployment owns, without their data."""
        owned = self.cache.owned(owner_key(dict(body)), only="ControllerRevision")
        return [revision for revision in owned if controller_uid(revision) == _uid(body)]

    async def revision_data(self, namespace: str, name: str) -> Any:
        """The data of a ControllerRevision; None when it is deleted. The data is immutable, so it is read
        once.
        """
        known = self.cache.get(kinds.REVISION.kind, namespace, name)
        if (
            known is not None
            and (data := self._revision_cache.get(owner_key(known), _uid(known))) is not None
        ):
            return data
        revision = await self._reader.one(kinds.REVISION, namespace, name)
        if revision is None:
            return None
        self._revision_cache.put(owner_key(revision), _uid(revision), revision.get("data"))
        return revision.get("data")

    async def profile(self, name: str) -> Object | None:
        """The AcceleratorProfile, None where it does not exist. Raises RejectedError without the right to
        read it.
        """
        return await self._reader.one(kinds.PROFILE, "", name)

    async def refused_references(self, namespace: str, references: Iterable[Reference]) -> list[Reference]:
        """Those of `references` whose object does not exist or does not carry the label that allows them.
        Raises RejectedError without the right to read them.
        """
        refused = []
        for one in references:
            labels = await self._reader.labels(kinds.BY_NAME[one.kind], namespace, one.name)
            if (labels or {}).get(names.LABEL_REFERABLE) != "true":
                refused.append(one)
        return refused

    async def observe(self, body: Body, wanted: Iterable[Ref] = ()) -> Observed:
        """The LLMDeployment's objects from the cache; a wanted object that is not in it is read by name."""
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
            if live["kind"] in mine and is_owned(live, uid):
                children[ref(live)] = live
            elif scales_workload(live, key.name):
                autoscalers.append(live)
        has_pods = any(live["kind"] == "Pod" for live in related)
        for target in wanted:
            kind = kinds.BY_NAME[target.kind]
            is_known = not kind.optional and kind.kind not in self._unlisted
            if is_known and target in children:
                continue
            if target.kind in NEED_A_POD and not has_pods:
                continue  # it is not applied yet
            try:
                found = await self._reader.one(kind, key.namespace, target.name)
            except ForbiddenError as error:
                if not kind.on_demand:
                    raise
                forbidden[kind.kind] = str(error)
                continue
            if not is_known:
                self._forget_replaced(children.pop(target, None), found)
            if kind.optional and found is None and not await self._reader.is_installed(kind):
                missing.add(kind.kind)
            if found is not None and is_owned(found, uid):
                self.cache.put(found)
                children[target] = found
            elif found is not None:
                _raise_if_predecessor(found, key)
                foreign.append(target)
        found_pods = find_workload(list(children.values()), related)
        all_pods = (*found_pods.pods, *found_pods.workers, *found_pods.download_pods)
        return Observed(
            body=body,
            children=children,
            foreign=tuple(foreign),
            foreign_autoscalers=tuple(live for live in autoscalers if not is_keda_autoscaler(live, key.name)),
            keda_autoscaler=next((live for live in autoscalers if is_keda_autoscaler(live, key.name)), None),
            missing=frozenset(missing),
            forbidden=forbidden,
            replica_sets=found_pods.replica_sets,
            pods=found_pods.pods,
            workers=found_pods.workers,
            download_pods=found_pods.download_pods,
            samples={uid: self.samples[uid] for pod in all_pods if (uid := _uid(pod)) in self.samples},
            demanded_at=self.demands.get(key, 0.0),
            job_error=await self._job_error(children.values(), found_pods.download_pods, key.namespace),
            mount_errors=await self._mount_errors(all_pods, key.namespace),
        )

    async def _mount_errors(self, pods: Sequence[Body], namespace: str) -> dict[str, str]:
        """The notes of the kubelet's FailedMount Events, by pod uid; read only for pods that seem to wait for
        a volume.
        """
        waiting = [_uid(pod) for pod in pods if awaits_volumes(pod, datetime.now(UTC))]
        notes = {uid: await self._reader.latest_event_note("FailedMount", uid, namespace) for uid in waiting}
        return {uid: error for uid, error in notes.items() if error}

    async def _job_error(
        self, children: Iterable[Body], download_pods: Sequence[Body], namespace: str
    ) -> str:
        """Why the download Job gets no pod, in its controller's words; read only where it seems to wait for
        one.
        """
        now = datetime.now(UTC)
        jobs = [
            child for child in children if child["kind"] == "Job" and awaits_pods(child, download_pods, now)
        ]
        notes = [await self._reader.latest_event_note("FailedCreate", _uid(job), namespace) for job in jobs]
        return next(filter(None, notes), "")

    async def execute(self, plan: Plan, namespace: str) -> None:
        """Make the writes of a plan in order."""
        for revision in plan.revision_patches:
            document = {
                "metadata": {"uid": revision.uid, "annotations": dict(revision.annotations)},
                "revision": revision.number,
            }
            path = kinds.REVISION.path(namespace, revision.name)
            self.cache.put(await self._write("PATCH", path, body=document, content_type=MERGE_PATCH))
        for target, uid in plan.delete_first:
            await self._delete(target, namespace, uid)
        for manifest in plan.apply:
            if paths := plan.take_over.get(ref(manifest)):
                await self._take_over(ref(manifest), namespace, paths)
            await self._apply(manifest)
        for target, uid in plan.delete:
            await self._delete(target, namespace, uid)
        for pod in plan.pod_patches:
            patch = {"metadata": {"uid": pod.uid, "annotations": dict(pod.annotations)}}
            path = kinds.POD.path(namespace, pod.name)
            patched = await self._ignoring_absence(
                self._write("PATCH", path, body=patch, content_type=MERGE_PATCH)
            )
            if patched is not None:
                self.cache.put(patched)

    async def stop_pods(self, deployment: Body) -> None:
        """Let a Deployment run none, whatever else is to be applied to it."""
        metadata = deployment["metadata"]
        patch = {"metadata": {"uid": metadata["uid"]}, "spec": {"replicas": 0}}
        path = kinds.DEPLOYMENT.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER}
        write = self._write("PATCH", path, query=query, body=patch, content_type=MERGE_PATCH)
        if (answer := await self._ignoring_absence(write)) is not None:
            self.cache.put(answer)

    async def patch_status(self, body: Body, patch: dict[str, Any]) -> None:
        """Merge `patch` into the status; ConflictError if the object has changed since it was read."""
        metadata = body["metadata"]
        path = kinds.LLM_DEPLOYMENT.path(metadata["namespace"], metadata["name"], "status")
        document = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": patch}
        answer = await self._write("PATCH", path, body=document, content_type=MERGE_PATCH)
        self.cache.put(answer)

    async def refresh(self, key: Key) -> None:
        """Read the objects again that are written with a resourceVersion, after a conflict."""
        prefill = names.workload(key.name, names.ROLE_PREFILL)
        is_known = self.cache.has(kinds.DEPLOYMENT.kind, key.namespace, prefill)
        more = [(kinds.DEPLOYMENT, prefill)] if is_known else []
        for kind, name in ((kinds.LLM_DEPLOYMENT, key.name), (kinds.DEPLOYMENT, key.name), *more):
            live = await self._reader.one(kind, key.namespace, name)
            if live is not None:
                self.cache.put(live)

    async def record_event(self, body: Body, event: Event) -> None:
        """Create an Event about the LLMDeployment."""
        document = _event_object(body, event, instance=self._instance)
        await self._write("POST", kinds.EVENT.path(body["metadata"]["namespace"]), body=document)

    async def _take_over(self, target: Ref, namespace: str, paths: Sequence[FieldPath]) -> None:
        """Make the operator's apply the only owner of `paths`, unless it is; ConflictError if the object
        changes meanwhile. The cache has no managed fields, so the object is read.
        """
        kind = kinds.BY_NAME[target.kind]
        live = await self._reader.one(kind, namespace, target.name)
        if live is None:
            return
        owners = managed_fields(live, paths)
        if owners == live["metadata"].get("managedFields"):
            return
        version = live["metadata"]["resourceVersion"]
        document = {"metadata": {"resourceVersion": version, "managedFields": owners}}
        path = kind.path(namespace, target.name)
        await self._write("PATCH", path, body=document, content_type=MERGE_PATCH)

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
            self._forget_replaced(known, found := await self._reader.one(kind, namespace, target.name))
            if known is not None and found is not None and _uid(found) == uid:
                self.cache.put(found)

    async def _write(self, method: str, path: str, **arguments: Any) -> Object:
        self._fence()
        return await self._connection.request(method, path, **arguments)

    async def _ignoring_absence(self, write: Awaitable[Object]) -> Object | None:
        """An object that was deleted or replaced needs no further deletion or patch."""
        try:
            return await write
        except (NotFoundError, ConflictError):
            return None

    def _forget_replaced(self, known: Body | None, found: Body | None) -> None:
        """Remove `known` from the cache if the live object of its name is another one, or none."""
        if known is not None and (found is None or _uid(found) != _uid(known)):
            self.cache.remove(dict(known))


def _uid(body: Body) -> str:
    return str(body["metadata"]["uid"])


def _raise_if_predecessor(live: Body, key: Key) -> None:
    for owner in live["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and (owner.get("kind"), owner.get("name")) == (names.KIND, key.name):
            raise PredecessorError(f"{ref(live)} of the deleted {key.name} is not collected yet")


def _event_object(body: Body, event: Event, *, instance: str) -> Object:
    """The Event as the API server takes it. `instance`: the process that reports it."""
    metadata = body["metadata"]
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.kind,
        "metadata": {
            "name": f"{metadata['name']}.{secrets.token_hex(8)}",
            "namespace": metadata["namespace"],
        },
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": names.GROUP + "/" + names.FIELD_MANAGER,
        "reportingInstance": instance[:128],
        "type": event.kind,
        "reason": event.reason,
        "action": event.action,
        "note": event.note[:1024],
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
