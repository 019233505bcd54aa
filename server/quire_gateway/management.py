"""What the gateway answers itself: its probes, its metrics, and which models there are."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

from quire_gateway.dispatch import Dispatcher
from quire_gateway.informer import Informer
from quire_gateway.llm_client import LLMClient
from quire_gateway.metrics import Metrics
from quire_http.drain import Drain
from quire_http.errors import ApiError
from quire_http.exchange import HttpExchange

PREFIX = "/v1/models"


class Management:
    """The routes for GET."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        drain: Drain,
        informers: Sequence[Informer],
        created: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._drain = drain
        self._informers = informers
        self._created = created
        self._is_ready = False

    async def get(self, exchange: HttpExchange) -> None:
        """Answer probes and scrapes, which need no key."""
        path = exchange.scope["path"]
        if path == "/healthz":
            await exchange.json({"ok": True})
        elif path == "/readyz":
            reason = "Draining" if self._drain.begun else self._missing()
            await exchange.json({"ok": not reason, "reason": reason}, 503 if reason else 200)
        else:
            text, kind = self._metrics.exposition(*self._dispatcher.names())
            await exchange.whole(200, text, kind)

    async def get_models(self, exchange: HttpExchange, client: LLMClient | None) -> None:
        """Answer which models this client may ask for. Raises ApiError."""
        path = exchange.scope["path"]
        if path == PREFIX:
            cards = [self._card(name, client) for name in self._dispatcher.models(client)]
            await exchange.json({"object": "list", "data": cards})
        elif path.startswith(f"{PREFIX}/"):
            name = unquote(path.removeprefix(f"{PREFIX}/"))
            self._dispatcher.require(name, client)
            await exchange.json(self._card(name, client))
        else:
            raise not_found(path)

    def is_ready(self) -> bool:
        """Whether all kinds of objects were listed once: before, nothing is known of keys."""
        self._is_ready = self._is_ready or not self._missing()  # what was listed stays so
        return self._is_ready

    def _missing(self) -> str:
        """The first kind that was not listed yet."""
        return next((f"No {one.kind.plural}" for one in self._informers if not one.has_listed), "")

    def _card(self, name: str, client: LLMClient | None) -> dict[str, object]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "quire"}
        parent = self._dispatcher.parent(name, client)
        return card if parent is None else {**card, "parent": parent}


def not_found(path: str) -> ApiError:
    """There is nothing at a path."""
    return ApiError(404, f"There is no {path}.", code="not_found")
