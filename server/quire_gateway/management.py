"""What the gateway answers itself: its probes, its metrics, and which models there are."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from quire_gateway.informer import Informer
from quire_gateway.metrics import Metrics
from quire_gateway.replicas import ReplicaTable
from quire_http.drain import Drain
from quire_http.exchange import HttpExchange

PREFIX = "/v1/models"


class Management:
    """The routes for GET."""

    def __init__(
        self, table: ReplicaTable, metrics: Metrics, drain: Drain, informers: Sequence[Informer], created: int
    ) -> None:
        self._table = table
        self._metrics = metrics
        self._drain = drain
        self._informers = informers
        self._created = created

    async def get(self, exchange: HttpExchange) -> bool:
        """Answer; False where there is nothing at this path. Raises ApiError."""
        path = exchange.scope["path"]
        if path == "/healthz":
            await exchange.json({"ok": True})
        elif path == "/readyz":
            reason = self._not_ready()
            await exchange.json({"ok": not reason, "reason": reason}, 503 if reason else 200)
        elif path == "/metrics":
            text, kind = self._metrics.exposition()
            await exchange.whole(200, text, kind)
        elif path == PREFIX:
            cards = [self._card(one.name) for one in self._table.models()]
            await exchange.json({"object": "list", "data": cards})
        elif path.startswith(f"{PREFIX}/"):
            name = unquote(path.removeprefix(f"{PREFIX}/"))
            await exchange.json(self._card(self._table.served(name).name))
        else:
            return False
        return True

    def _not_ready(self) -> str:
        if self._drain.begun:
            return "Draining"
        return "" if all(one.has_listed for one in self._informers) else "NoEndpointSlices"

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "quire"}
