"""The adapter's own Prometheus metrics, and the HTTP server for /metrics and the probes.

One registry per process, passed on explicitly; there is no global registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.scrapes = Counter(
            "quire_metrics_adapter_scrapes_total", "Pods asked, by result.", ["result"], registry=registry
        )
        self.scrape_seconds = Histogram(
            "quire_metrics_adapter_scrape_seconds",
            "Duration of a pod's answer.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.pods = Gauge("quire_metrics_adapter_ready_pods", "Pods that are asked.", registry=registry)
        self.requests = Counter(
            "quire_metrics_adapter_requests_total",
            "Requests for a metric or a discovery document, by HTTP status.",
            ["code"],
            registry=registry,
        )
        self.unreadable_objects = Counter(
            "quire_metrics_adapter_unreadable_objects_total",
            "Objects that could not be read in full, each time that they were read; the log names them.",
            ["kind"],
            registry=registry,
        )
        self.renewals = Counter(
            "quire_metrics_adapter_certificates_total", "Certificates that were served.", registry=registry
        )


@asynccontextmanager
async def serve(
    metrics: Metrics, port: int, unready: Callable[[], str], more: Iterable[web.RouteDef] = ()
) -> AsyncIterator[None]:
    """Serve /metrics, /healthz, /readyz and `more` while the block runs. `unready`: what is missing, or
    empty.
    """

    async def show_metrics(_: web.Request) -> web.Response:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def show_health(_: web.Request) -> web.Response:
        return web.Response(
            text="ok\n"
        )  # a task that fails ends the process, so a process that answers is alive

    async def show_readiness(_: web.Request) -> web.Response:
        missing = unready()
        return web.Response(text=f"{missing or 'ok'}\n", status=503 if missing else 200)

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", show_metrics),
            web.get("/healthz", show_health),
            web.get("/readyz", show_readiness),
            *more,
        ]
    )
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, None, port).start()
        yield
    finally:
        await runner.cleanup()
