"""Says in a Lease which generation of each object this gateway uses, and writes the objects' status for all.

One gateway writes, the first by name of those that run; each could. Requests never wait for this: where the
API server refuses or is away it is tried again, and only the status is old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from quire_gateway import object_events, rollout
from quire_gateway.gateway_leases import GatewayLeases, lease
from quire_gateway.informer import LEASES, LLM_CLIENTS, LLM_EXTERNAL_BACKENDS, LLM_ROUTES, Kind
from quire_gateway.kube_api import FAILURES, ConflictError, Connection, KubeApi, KubeError, MissingError
from quire_gateway.llm_external_backend import LLMExternalBackend
from quire_gateway.object_status import (
    client_conditions,
    external_conditions,
    generation_of,
    route_conditions,
    status,
)
from quire_gateway.replicas import ReplicaTable
from quire_gateway.rollout import RolloutCounts, Sides
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import Body, Place, place_of, uid_of

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0
_GATHER_SECONDS = 0.05  # changes that come together are written together
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_DELETE_SECONDS = 2.0
_JSON = "application/json"
_MERGE_PATCH, _APPLY_PATCH = "application/merge-patch+json", "application/apply-patch+yaml"


class StatusWriter:
    """That of one gateway, by its name and its namespace."""

    def __init__(
        self,
        api: KubeApi,
        place: tuple[str, str],
        state: RoutingState,
        leases: GatewayLeases,
        replicas: ReplicaTable,
        rollouts: RolloutCounts,
        key_problem: Callable[[LLMExternalBackend], tuple[str, str] | None] = lambda _: None,
    ) -> None:
        self._api = api
        self._namespace, self._name = place
        self._state = state
        self._leases = leases
        self._replicas = replicas
        self._rollouts = rollouts
        self._key_problem = key_problem
        self._said: dict[str, int] | None = None  # the generations in the Lease
        self._renewed_at = float("-inf")

    async def run(self) -> None:
        """Until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._api.connect() as connection:
                    while True:
                        await self._step(connection)
                        pause = _FIRST_PAUSE_SECONDS
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._state.changed.wait(), RENEW_SECONDS)
                        await asyncio.sleep(_GATHER_SECONDS)
            except FAILURES as error:
                logger.warning("cannot write the status of routes, clients and backends: %r", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def close(self) -> None:
        """This gateway ends, and is no longer counted."""
        with contextlib.suppress(*FAILURES):
            async with asyncio.timeout(_DELETE_SECONDS), self._api.connect() as connection:
                await connection.send("DELETE", self._path(LEASES, self._namespace, self._name))

    async def _step(self, connection: Connection) -> None:
        self._state.changed.clear()
        stores = (self._state.routes, self._state.clients, self._state.externals)
        objects = [body for store in stores for body in store.bodies()]
        generations = {uid_of(body): generation_of(body) for body in objects}
        if generations != self._said or time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            self._rollouts.keep({one.uid for one in self._state.table.routes.values() if one.rollout})
            now = _now("%Y-%m-%dT%H:%M:%S.000000Z")
            body = lease(self._name, generations, now, self._rollouts.document())
            path = self._path(LEASES, self._namespace, self._name)
            await connection.send(
                "PATCH", f"{path}?fieldManager=quire-gateway&force=true", body, _APPLY_PATCH
            )
            self._said, self._renewed_at = generations, time.monotonic()
        live = self._leases.live()
        if live and min(live) == self._name:
            await self._write(connection, list(self._changes()))

    async def _write(
        self, connection: Connection, changes: list[tuple[Kind, Body, dict[str, object]]]
    ) -> None:
        """Write each; one that is refused keeps none of the others waiting."""
        refusal: KubeError | None = None
        for kind, old, new in changes:
            patch = {"metadata": {"uid": uid_of(old)}, "status": new}
            path = f"{self._path(kind, *place_of(old))}/status"
            try:
                await connection.send("PATCH", f"{path}?fieldManager=quire-gateway", patch, _MERGE_PATCH)
                await self._say(connection, old, new)
            except MissingError:  # it was deleted meanwhile
                continue
            except KubeError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    async def _say(self, connection: Connection, old: Body, new: Mapping[str, Any]) -> None:
        """Create the Events of a change that is written. One that is refused is lost, the status is not."""
        for event in object_events.events(old, new):
            body = object_events.document(event, old, self._name, _now("%Y-%m-%dT%H:%M:%S.000000Z"))
            try:
                await connection.send("POST", object_events.path(body["metadata"]["namespace"]), body, _JSON)
            except ConflictError:  # another gateway wrote the same change
                continue
            except KubeError as error:
                logger.warning("cannot create the Event %s: %r", event.reason, error)

    def _changes(self) -> Iterator[tuple[Kind, Body, dict[str, object]]]:
        """The objects whose status is not what it should be, with that status."""
        table, live, now = self._state.table, self._leases.live(), _now("%Y-%m-%dT%H:%M:%SZ")
        known = self._replicas.places() | set(table.served_names)
        ready = self._replicas.ready_places()
        for body in self._state.routes.bodies():
            rolled = self._rollout(body, known)
            new = status(body, route_conditions(body, table, known, ready, rolled), live, now)
            if new | ({"rollout": rolled} if rolled else {}) != _without_usage(body):
                yield LLM_ROUTES, body, new | {"rollout": rolled}
        for body in self._state.clients.bodies():
            new = status(body, client_conditions(body, table, time.time()), live, now)
            if new != _without_usage(body):
                yield LLM_CLIENTS, body, new
        for body in self._state.externals.bodies():
            new = status(body, external_conditions(body, table, self._key_problem), live, now)
            if new != body.get("status"):
                yield LLM_EXTERNAL_BACKENDS, body, new

    def _rollout(self, body: Body, known: Collection[Place]) -> dict[str, Any] | None:
        """Where the rollout of a route is now; None where it has none."""
        route = next((one for one in self._state.table.routes.values() if one.uid == uid_of(body)), None)
        if route is None or route.rollout is None:
            return None
        key, _ = rollout.current(route.rollout, route.rollout_status)
        seen = Sides()
        for document in self._leases.rollouts():
            stable, candidate = rollout.counts_of(document, route.uid, key)
            seen = Sides(seen.stable.plus(stable), seen.candidate.plus(candidate))
        is_resolved = (route.namespace, route.rollout.deployment) in known
        return rollout.advance(
            route.rollout, route.rollout_status, seen, time.time(), is_resolved=is_resolved
        )

    @staticmethod
    def _path(kind: Kind, namespace: str, name: str) -> str:
        return f"{kind.path(namespace)}/{name}"


def _without_usage(body: Body) -> dict[str, object]:
    return {name: value for name, value in (body.get("status") or {}).items() if name != "usage"}


def _now(form: str) -> str:
    return time.strftime(form, time.gmtime())
