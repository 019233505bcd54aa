"""Saves what clients have used to the status of each LLMClient, every few seconds, and once more at the end.

Each gateway adds its own part. An object that another one has written since is not overwritten: the watch
brings what that one wrote, and the sum is tried again.
"""

from __future__ import annotations

import asyncio
import logging

from quire_gateway.informer import LLM_CLIENTS
from quire_gateway.kube_api import FAILURES, ConflictError, Connection, KubeApi, KubeError, MissingError
from quire_gateway.routing_state import RoutingState
from quire_gateway.routing_table import Body
from quire_gateway.usage_ledger import Unsaved, UsageLedger, document, saved

logger = logging.getLogger(__name__)

SAVE_SECONDS = 10.0
_CONFLICT_SECONDS = 0.5  # until the watch has brought what another gateway wrote
_CLOSE_SECONDS = 3.0
_MERGE_PATCH = "application/merge-patch+json"


class UsageWriter:
    """That of one gateway."""

    def __init__(self, api: KubeApi, state: RoutingState, ledger: UsageLedger) -> None:
        self._api = api
        self._state = state
        self._ledger = ledger

    async def run(self) -> None:
        """Until cancelled. Where the API server is away, what was used is kept and saved later."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            try:
                async with self._api.connect() as connection:
                    await self._save_all(connection)
            except FAILURES as error:
                logger.warning("cannot save what clients have used: %r", error)

    async def close(self) -> None:
        """This gateway ends; so far as time allows nothing that it has counted is lost."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS), self._api.connect() as connection:
                while list(self._ledger.unsaved()):
                    await self._save_all(connection)
        except FAILURES as error:
            logger.warning("what clients have used in the last seconds is not saved: %r", error)

    async def _save_all(self, connection: Connection) -> None:
        refusal: KubeError | None = None
        for one, body in self._ledger.unsaved():
            try:
                await self._save(connection, one, body)
            except MissingError:  # it was deleted meanwhile
                continue
            except ConflictError:
                await asyncio.sleep(_CONFLICT_SECONDS)
            except KubeError as error:  # of this object; the others are saved all the same
                refusal = error
        if refusal is not None:
            raise refusal

    async def _save(self, connection: Connection, one: Unsaved, body: Body) -> None:
        patch = {
            "metadata": {name: body["metadata"][name] for name in ("uid", "resourceVersion")},
            "status": {"usage": document(one.period, saved(body, one.period) + one.spent)},
        }
        place = (one.client.namespace, one.client.name)
        path = f"{LLM_CLIENTS.path(place[0])}/{place[1]}/status?fieldManager=quire-gateway"
        written = await connection.send("PATCH", path, patch, _MERGE_PATCH)
        self._ledger.saved(one)
        if self._state.clients.get(place) is body:  # else the watch has brought this, or what is newer
            self._state.clients.put(written)
