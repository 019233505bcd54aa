"""The cache of live objects, so that a reconcile without a change costs no request.

Filled by watch events, re-lists and the responses to our own writes; an older version never replaces a newer
one. Objects are stored as compressed JSON, which takes a fraction of the memory of dicts, without
managedFields (except the owners of the number of replicas) and without the data of ControllerRevisions.
Deleted objects are remembered for as long as an older event or list may still arrive. Sends no request.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_operator import names
from quire_operator.json_decoder import Report
from quire_operator.observed import WORKLOAD_KINDS, managers_of_replicas

Object = dict[str, Any]

TOMBSTONE_SECONDS = 300.0  # longer than any request, and than all pages of a list


class Key(NamedTuple):
    """The key of an LLMDeployment in the work queue."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Changes:
    """What a re-list found that the watch had not reported, and the LLMDeployments that own it."""

    owners: frozenset[Key]
    missed: frozenset[str]  # uids of objects that the watch should have reported
    removed: int


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    uid: str
    owner: Key
    packed: bytes
    pool: str = ""

    def body(self) -> Object:
        """Freshly decoded."""
        decoded: Object = json.loads(zlib.decompress(self.packed))
        return decoded


class Cache:
    """Objects by kind, namespace and name, and by the LLMDeployment whose label they carry. `clock` is
    monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, dict[tuple[str, str], _Entry]] = defaultdict(dict)
        self._of_owner: dict[Key, set[tuple[str, str]]] = defaultdict(set)  # -> (kind, name)
        self._of_pool: dict[Key, set[tuple[str, str]]] = defaultdict(set)  # namespace, pool -> (kind, name)
        self._owners: dict[Key, Key] = {}  # interned, so that each key is in memory once
        # uid -> when and at which version it was deleted, or left the watch by losing its label.
        self._tombstones: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def put(self, body: Object) -> bool:
        """Store `body`; False when it is known already, older than the stored version, or deleted."""
        metadata = body["metadata"]
        owner = owner_key(body)
        owner = self._owners.get(owner, owner)
        kind, place = str(body["kind"]), (owner.namespace, str(metadata["name"]))
        uid, version = str(metadata["uid"]), version_of(body)
        known = self._entries[kind].get(place)
        is_old = known is not None and known.uid == uid and known.version >= version
        if is_old or version <= self._tombstones.get(uid, (0.0, -1))[1]:
            return False
        if known is not None:
            self._drop(kind, place)
        kept = {**body, "metadata": {k: v for k, v in metadata.items() if k != "managedFields"}}
        kept.pop("data" if kind == "ControllerRevision" else "", None)
        if kind in WORKLOAD_KINDS and (claims := managers_of_replicas(body)):
            kept["metadata"]["managedFields"] = claims
        packed = zlib.compress(json.dumps(kept, separators=(",", ":")).encode(), level=1)
        pool = _pool(body)
        self._entries[kind][place] = _Entry(version, uid, owner, packed, pool)
        if pool:
            self._of_pool[Key(place[0], pool)].add((kind, place[1]))
        self._of_owner[self._owners.setdefault(owner, owner)].add((kind, place[1]))
        return True

    def remove(self, body: Object) -> None:
        """Remove a deleted object; only a newer version of it can be stored again."""
        metadata = body["metadata"]
        self._add_tombstone(str(metadata["uid"]), version_of(body))
        place = (str(metadata["namespace"]), str(metadata["name"]))
        known = self._entries[str(body["kind"])].get(place)
        if known is not None and known.uid == metadata["uid"]:
            self._drop(str(body["kind"]), place)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """One object, freshly decoded."""
        entry = self._entries[kind].get((namespace, name))
        return None if entry is None else entry.body()

    def has(self, kind: str, namespace: str, name: str) -> bool:
        """Whether the object is stored."""
        return (namespace, name) in self._entries[kind]

    def owned(self, key: Key, *, only: str = "", but: str = "") -> Iterator[Object]:
        """All objects that carry the label of `key`, and the LLMDeployment itself; `only` those of a kind, or
        all `but` those of a kind.
        """
        for kind, name in sorted(self._of_owner.get(key, ())):
            if only not in ("", kind) or kind == but:
                continue
            entry = self._entries[kind].get((key.namespace, name))
            if entry is not None and entry.owner == key:
                yield entry.body()

    def pool_of(self, key: Key) -> str:
        """The pool of an LLMDeployment that shares an accelerator; empty for others."""
        entry = self._entries[names.KIND].get((key.namespace, key.name))
        return "" if entry is None else entry.pool

    def has_pool(self, pool: Key) -> bool:
        """Whether something is in the pool."""
        return pool in self._of_pool

    def in_pool(self, pool: Key) -> Iterator[Object]:
        """The LLMDeployments and pods of a pool, by its namespace and name."""
        for kind, name in sorted(self._of_pool.get(pool, ())):
            entry = self._entries[kind].get((pool.namespace, name))
            if entry is not None:
                yield entry.body()

    def members(self, pool: Key) -> list[Key]:
        """The LLMDeployments of a pool, by its namespace and name."""
        found = self._of_pool.get(pool, ())
        return [Key(pool.namespace, name) for kind, name in sorted(found) if kind == names.KIND]

    def llm_deployments(self) -> list[Key]:
        """Every LLMDeployment."""
        return [Key(*place) for place in self._entries[names.KIND]]

    def changed(self, kind: str, known: Mapping[str, int]) -> Iterator[Object]:
        """The objects of `kind` of which `known` (version by uid) has no version or another one."""
        for entry in list(self._entries[kind].values()):
            if known.get(entry.uid) != entry.version:
                yield entry.body()

    def versions(self, kind: str) -> dict[str, int]:
        """The known version of every object of `kind`, by uid."""
        return {entry.uid: entry.version for entry in self._entries[kind].values()}

    def sweep(self, kind: str, listed: set[str], version: int) -> list[Key]:
        """Remove the objects that a complete list made at `version` does not contain; returns the owner of
        each.
        """
        lost = [
            (place, entry)
            for place, entry in self._entries[kind].items()
            if entry.uid not in listed and entry.version <= version
        ]
        for place, entry in lost:
            self._add_tombstone(entry.uid, version)
            self._drop(kind, place)
        return [entry.owner for _, entry in lost]

    def clear(self, kind: str) -> Changes:
        """Remove all objects of `kind`."""
        known = list(self.changed(kind, {}))
        for body in known:
            self.remove(body)
        return Changes(frozenset(owner_key(body) for body in known), frozenset(), len(known))

    def _drop(self, kind: str, place: tuple[str, str]) -> None:
        entry = self._entries[kind].pop(place)
        if entry.pool:
            sharing = self._of_pool[Key(place[0], entry.pool)]
            sharing.discard((kind, place[1]))
            if not sharing:
                del self._of_pool[Key(place[0], entry.pool)]
        members = self._of_owner[entry.owner]
        members.discard((kind, place[1]))
        if not members:
            del self._of_owner[entry.owner], self._owners[entry.owner]

    def _add_tombstone(self, uid: str, version: int) -> None:
        now = self._clock()
        self._tombstones.pop(uid, None)
        self._tombstones[uid] = now, version
        while next(iter(self._tombstones.values()))[0] < now - TOMBSTONE_SECONDS:
            self._tombstones.popitem(last=False)


class Listing:
    """Puts a complete list of one kind into the cache, page by page. `report` gets the objects that the cache
    cannot take, each of which concerns nothing but itself.
    """

    def __init__(self, cache: Cache, kind: str, report: Report) -> None:
        self._cache = cache
        self._kind = kind
        self._report = report
        self._version: int | None = None
        self._listed: set[str] = set()
        self._missed: set[str] = set()
        self._owners: set[Key] = set()

    def add(self, bodies: Iterable[Object], version: int) -> None:
        """Add one page of a list made at resource version `version`."""
        self._version = version if self._version is None else min(self._version, version)
        for body in bodies:
            uid = str(body["metadata"]["uid"])
            self._listed.add(uid)
            try:
                is_new = self._cache.put(body)
            except Exception as error:
                self._report(body, f"{type(error).__name__}: {error}")
                continue
            if is_new:
                self._missed.add(uid)
                self._owners.add(owner_key(body))

    def finish(self) -> Changes:
        """After the last page: remove what no page contained."""
        lost = self._cache.sweep(self._kind, self._listed, self._version or 0)
        return Changes(frozenset(self._owners.union(lost)), frozenset(self._missed), len(lost))


def owner_key(body: Object) -> Key:
    """The LLMDeployment that the object is, or belongs to by its label or by the Deployment that it
    scales.
    """
    metadata = body["metadata"]
    if body["kind"] == names.KIND:
        return Key(str(metadata["namespace"]), str(metadata["name"]))
    name = (metadata.get("labels") or {}).get(names.LABEL_NAME, "")
    if not name and body["kind"] == "HorizontalPodAutoscaler":
        name = ((body.get("spec") or {}).get("scaleTargetRef") or {}).get("name", "")
    return Key(str(metadata["namespace"]), str(name))


def _pool(body: Object) -> str:
    """The pool of an LLMDeployment or a pod that shares an accelerator; empty for others."""
    if body["kind"] == names.KIND:
        sharing = (body.get("spec") or {}).get("sharing")
        return str(sharing.get("pool", "")) if isinstance(sharing, Mapping) else ""
    return (
        str((body["metadata"].get("labels") or {}).get(names.LABEL_POOL, "")) if body["kind"] == "Pod" else ""
    )


def version_of(body: Object) -> int:
    """The resource version: only ever compared with others of the same API server."""
    text = str(body["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0
