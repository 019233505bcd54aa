"""The objects of the watched namespaces that requests are routed by, and the table that they give.

The informers fill it. The table is resolved when it is asked for after a change, so that a request after a
change never sees the table from before. Knows no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire_gateway.routing_table import Body, Place, RoutingTable, place_of, resolve


class ObjectStore:
    """The objects of one kind. ``changed`` is called after each change. ``part_of_status``: the only one that
    is routed by, none where it is empty.
    """

    def __init__(self, changed: Callable[[], None], part_of_status: str = "") -> None:
        self._changed = changed
        self._part_of_status = part_of_status
        self._bodies: dict[Place, Body] = {}

    def bodies(self) -> list[Body]:
        """All of them."""
        return list(self._bodies.values())

    def get(self, place: Place) -> Body | None:
        """The object at a place."""
        return self._bodies.get(place)

    def replace(self, bodies: Iterable[Mapping[str, Any]], namespace: str) -> None:
        """These are all objects of a namespace."""
        kept = {place: body for place, body in self._bodies.items() if place[0] != namespace}
        self._bodies = kept | {place_of(body): _trimmed(body) for body in bodies}
        self._changed()

    def put(self, body: Mapping[str, Any]) -> None:
        """An object is new or has changed."""
        before, now = self._bodies.get(place_of(body)), _trimmed(body)
        self._bodies[place_of(body)] = now
        part = self._part_of_status
        if before is None or _routed_by(before, part) != _routed_by(now, part):
            self._changed()

    def remove(self, body: Mapping[str, Any]) -> None:
        """An object is deleted."""
        self._bodies.pop(place_of(body), None)
        self._changed()


class RoutingState:
    """What one gateway routes by. ``changed`` is set by every change; what waits for it clears it."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.routes = ObjectStore(self._invalidate, "rollout")
        self.clients = ObjectStore(self._invalidate)
        self.deployments = ObjectStore(self._invalidate)
        self.externals = ObjectStore(self._invalidate)
        self._table: RoutingTable | None = None

    @property
    def table(self) -> RoutingTable:
        """The table of the objects of now; the same one until an object changes."""
        if self._table is None:
            stores = (self.routes, self.clients, self.deployments, self.externals)
            self._table = resolve(*(one.bodies() for one in stores))
        return self._table

    def _invalidate(self) -> None:
        self._table = None
        self.changed.set()


def _trimmed(body: Mapping[str, Any]) -> Body:
    """Without what is long and not read here."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": metadata}


def _routed_by(body: Body, part_of_status: str) -> Body:
    """All but the status, and of that the part that is routed by."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "resourceVersion"}
    return {**body, "metadata": metadata, "status": (body.get("status") or {}).get(part_of_status)}
