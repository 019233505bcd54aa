"""The aggregated API over HTTP: a thin shell that parses (`queries`), authorizes (`delegated_auth`) and
answers with `load`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from aiohttp import web

from quire_metrics_adapter import discovery, load, queries, response_documents
from quire_metrics_adapter.delegated_auth import ClientPeer, DelegatedAuth
from quire_metrics_adapter.errors import ApiError, InvalidError, RefusedError
from quire_metrics_adapter.kube_api import Connection
from quire_metrics_adapter.load_metrics import METRICS
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.pods import PodTable
from quire_metrics_adapter.queries import Query
from quire_metrics_adapter.scraper import Scraper
from quire_operator import names

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
_LLM_DEPLOYMENTS = f"/apis/{names.API_VERSION}/namespaces/{{}}/{names.PLURAL}"


class MetricsApi:
    """The request handlers."""

    def __init__(
        self,
        connection: Connection,
        guard: DelegatedAuth,
        table: PodTable,
        scraper: Scraper,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._guard = guard
        self._table = table
        self._scraper = scraper
        self._metrics = metrics
        self._clock = clock

    def runner(self) -> web.AppRunner:
        """The application, not listening yet."""
        app = web.Application(client_max_size=1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            document, content_type = await self._document(request)
            code = 200
        except RefusedError as refusal:
            document, content_type = response_documents.status(refusal), "application/json"
            code = refusal.code
        self._metrics.requests.labels(code=str(code)).inc()
        text = web.json_response(document).body
        return web.Response(body=text, status=code, headers={"Content-Type": content_type})

    async def _document(self, request: web.Request) -> tuple[response_documents.Document, str]:
        caller = await self._guard.caller(_peer(request))
        if request.method not in ("GET", "HEAD"):
            raise RefusedError(405, "MethodNotAllowed", "metrics can only be read")
        path = request.rel_url.raw_path
        # Every authenticated user may read discovery: if it needed rights, it could fail for lack of them,
        # and block the deletion of every namespace.
        found = discovery.document(path.rstrip("/"), request.headers.get("Accept", ""))
        if found is not None:
            return found
        query = queries.parse(path, request.query)
        await self._guard.allow(caller, query)
        items = await self._of_all(query) if query.name == queries.ALL else [self._of_one(query)]
        return response_documents.metric_values(query.version, query.metric, items), "application/json"

    def _of_one(self, query: Query) -> response_documents.Item:
        found = self._load(query, query.name)
        if isinstance(found, load.Unknown):
            message = f"{query.metric} of {query.namespace}/{query.name}: {found.message}"
            if found.is_absent:
                raise queries.not_found(message)
            raise RefusedError(503, "ServiceUnavailable", message)
        return _item(query, query.name, found)

    async def _of_all(self, query: Query) -> list[response_documents.Item]:
        """The selected LLMDeployments whose load is known: a list has no place for errors, so the others are
        left out.
        """
        path = _LLM_DEPLOYMENTS.format(query.namespace)
        selector = {"labelSelector": query.label_selector} if query.label_selector else {}
        try:
            listed = await self._connection.request("GET", path, query=selector)
        except InvalidError as error:
            raise RefusedError(400, "BadRequest", f"labelSelector: {error}") from error
        except ApiError as error:
            message = f"cannot list {names.PLURAL}: {error}"
            raise RefusedError(503, "ServiceUnavailable", message) from error
        selected = [str(body["metadata"]["name"]) for body in listed.get("items") or ()]
        found = {name: self._load(query, name) for name in selected}
        return [_item(query, name, one) for name, one in found.items() if isinstance(one, load.Load)]

    def _load(self, query: Query, name: str) -> load.Load | load.Unknown:
        if not self._table.known:
            return load.Unknown("which of its pods are ready is not known: the API server is out of reach")
        pods = self._table.of(query.namespace, name, METRICS[query.metric].role)
        return load.total(query.metric, pods, self._scraper.samples, self._clock())


def _item(query: Query, name: str, found: load.Load) -> response_documents.Item:
    at = datetime.now(UTC) - timedelta(seconds=found.age)
    return response_documents.Item(query.namespace, name, found.value, at)


def _peer(request: web.Request) -> ClientPeer:
    certificate = request.get_extra_info("peercert") or {}
    subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
    common_names = [value for key, value in subject if key == "commonName"]
    return ClientPeer(common_names[-1] if common_names else None, tuple(request.headers.items()))
