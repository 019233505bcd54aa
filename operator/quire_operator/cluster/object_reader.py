"""Reads live objects: one by its name, all of a kind page by page, the latest Event about an object.

Where a right is missing, the error names the RBAC rule that would grant it. Has no cache and writes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Object
from quire_operator.cluster.connection import JSON, Connection
from quire_operator.cluster.errors import ForbiddenError, NotFoundError
from quire_operator.cluster.kinds import Kind

_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
PAGE_SIZE = 100  # small pages keep the memory of a re-list small


class ObjectReader:
    """Reads from one API server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def one(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object of that name, None where there is none."""
        try:
            live = await self._get(kind, kind.path(namespace, name))
        except NotFoundError:
            return None
        return {**live, "apiVersion": kind.api_version, "kind": kind.kind}

    async def labels(self, kind: Kind, namespace: str, name: str) -> dict[str, str] | None:
        """The labels of the object of that name, None where there is none. Only its metadata is
        transferred.
        """
        try:
            live = await self._get(kind, kind.path(namespace, name), accept=_METADATA_ONLY)
        except NotFoundError:
            return None
        return live["metadata"].get("labels") or {}

    async def pages(self, kind: Kind, namespace: str) -> AsyncIterator[tuple[list[Object], int]]:
        """All objects, page by page, and the resource version of the list."""
        query = {"limit": str(PAGE_SIZE)}
        if kind.label:
            query["labelSelector"] = kind.label
        while True:
            page = await self._get(kind, kind.path(namespace), query)
            known = {"apiVersion": kind.api_version, "kind": kind.kind}
            metadata = page.get("metadata") or {}
            items = [{**item, **known} for item in page.get("items") or ()]
            yield items, int(metadata.get("resourceVersion") or 0)
            if not metadata.get("continue"):
                return
            query["continue"] = str(metadata["continue"])

    async def latest_event_note(self, reason: str, uid: str, namespace: str) -> str:
        """The note of the latest Event with this reason about the object `uid`; empty where there is none."""
        query = {"fieldSelector": f"regarding.uid={uid},reason={reason}", "limit": "20"}
        found = await self._get(kinds.EVENT, kinds.EVENT.path(namespace), query)
        items = found.get("items")
        return str(items[-1].get("note") or reason) if items else ""

    async def is_installed(self, kind: Kind) -> bool:
        """Whether the API server serves `kind`'s version at all."""
        try:
            await self._connection.request("GET", f"/apis/{kind.api_version}")
        except NotFoundError:
            return False
        return True

    async def _get(
        self, kind: Kind, path: str, query: Mapping[str, str] | None = None, accept: str = JSON
    ) -> Object:
        try:
            return await self._connection.request("GET", path, query=query, accept=accept)
        except ForbiddenError as error:
            raise ForbiddenError(f"{error}; the operator's role has to grant {kind.rule}") from error
