"""The same loads as plain numbers over HTTP, for KEDA: GET /load/NAMESPACE/NAME/METRIC is {METRIC:
number}.

KEDA's `metrics-api` trigger sends no credentials (ADR 22). An unknown value is an error, which KEDA handles
as one, and never 0. The exception is `ifNone=0`, used by triggers with scale to zero: without any pod, not
even a loading or draining one, the load is 0. The routes are served on the plain port.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from quire_metrics_adapter import load
from quire_metrics_adapter.load_metrics import METRICS
from quire_metrics_adapter.pods import PodTable
from quire_metrics_adapter.scraper import Scraper

UNKNOWN = "which pods there are is not known: the API server is out of reach"


def routes(
    table: PodTable, scraper: Scraper, clock: Callable[[], float] = time.monotonic
) -> list[web.RouteDef]:
    """The routes for an aiohttp application."""

    async def answer(request: web.Request) -> web.Response:
        namespace, name, metric = (request.match_info[part] for part in ("namespace", "name", "metric"))
        if metric not in METRICS:
            return _refused(404, f"there is no such metric; there are {', '.join(METRICS)}")
        if not table.known:
            return _refused(503, UNKNOWN)
        if request.query.get("ifNone") == "0" and not table.has_any(namespace, name):
            return web.json_response({metric: 0})
        found = load.total(metric, table.of(namespace, name, METRICS[metric].role), scraper.samples, clock())
        if isinstance(found, load.Unknown):
            return _refused(404 if found.is_absent else 503, found.message)
        return web.json_response({metric: found.value})

    return [web.get("/load/{namespace}/{name}/{metric}", answer)]


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
