"""Reads and writes one Lease, with timeouts shorter than the Lease's renewal.

Only sends requests; `lease.Election` decides. Not fenced, because the fence is computed from the Lease.
"""

from __future__ import annotations

from typing import Any

from quire_operator.cluster import kinds
from quire_operator.cluster.cache import Object
from quire_operator.cluster.connection import Connection
from quire_operator.cluster.errors import NotFoundError


class LeaseClient:
    """The Lease `namespace/name`."""

    def __init__(self, connection: Connection, *, namespace: str, name: str, seconds: float) -> None:
        self._connection = connection
        self._namespace = namespace
        self._name = name
        self._seconds = seconds

    async def read(self) -> Object | None:
        """The live Lease, None where there is none."""
        path = kinds.LEASE.path(self._namespace, self._name)
        try:
            return await self._connection.request("GET", path, seconds=self._seconds)
        except NotFoundError:
            return None

    async def create(self, spec: dict[str, Any]) -> Object:
        """A new Lease; ConflictError when another replica created it first."""
        document = self._document({"name": self._name, "namespace": self._namespace}, spec)
        path = kinds.LEASE.path(self._namespace)
        return await self._connection.request("POST", path, body=document, seconds=self._seconds)

    async def replace(self, lease: Object, spec: dict[str, Any]) -> Object:
        """The Lease with another spec; ConflictError if it was written since it was read."""
        path = kinds.LEASE.path(self._namespace, self._name)
        document = self._document(lease["metadata"], spec)
        return await self._connection.request("PUT", path, body=document, seconds=self._seconds)

    def _document(self, metadata: dict[str, Any], spec: dict[str, Any]) -> Object:
        return {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.kind,
            "metadata": metadata,
            "spec": spec,
        }
