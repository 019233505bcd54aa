"""The operator's own Prometheus metrics, and the HTTP server for /metrics and the probes.

Every replica serves them, leading or not. One registry per process, passed on explicitly; there is no global
registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SWAP_BUCKETS = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)


class Metrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "quire_operator_reconcile_total", "Reconciles, by result.", ["result"], registry=registry
        )
        self.reconcile_seconds = Histogram(
            "quire_operator_reconcile_seconds",
            "Duration of one reconcile.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.conflicts = Counter(
            "quire_operator_apply_conflicts_total",
            "Children that another client had changed and that were applied again.",
            ["kind"],
            registry=registry,
        )
        self.resyncs = Counter(
            "quire_operator_resync_total", "Full re-lists, by result.", ["result"], registry=registry
        )
        self.queue_depth = Gauge(
            "quire_operator_queue_depth", "LLMDeployments that wait for a worker.", registry=registry
        )
        self.queue_oldest_seconds = Gauge(
            "quire_operator_queue_oldest_seconds", "Age of the one that waits longest.", registry=registry
        )
        self.leader = Gauge("quire_operator_leader", "1 while this replica leads.", registry=registry)
        self.ready = Gauge(
            "quire_llmdeployment_ready",
            "1 while the LLMDeployment is Ready, 0 while it is not; nothing where no pods are wanted.",
            ["namespace", "llmdeployment"],
            registry=registry,
        )
        self.cost_per_hour = Gauge(
            "quire_llmdeployment_cost_per_hour",
            "Cost of the accelerators of its pods, by costPerHour of its profile; nothing without one.",
            ["namespace", "llmdeployment"],
            registry=registry,
        )
        self.swap_seconds = _swap_seconds(registry)
        self.watch_last_event = Gauge(
            "quire_operator_watch_last_event_timestamp_seconds",
            "When the watch of a kind last delivered an event.",
            ["kind"],
            registry=registry,
        )
        self.watch_stale = Gauge(
            "quire_operator_watch_stale",
            "1 while the watch of a kind misses what re-lists find; /healthz fails then.",
            ["kind"],
            registry=registry,
        )

        self.unreadable_objects = Counter(
            "quire_operator_unreadable_objects_total",
            "Objects that could not be read in full, each time that they were read; the log names them.",
            ["kind"],
            registry=registry,
        )

    def set_ready(self, namespace: str, name: str, ready: bool | None) -> None:
        """Readiness of one LLMDeployment; None where it was deleted or wants no pods."""
        _set(self.ready, namespace, name, ready)

    def set_cost(self, namespace: str, name: str, cost_per_hour: float | None) -> None:
        """Cost of one LLMDeployment; None where it was deleted or has no price."""
        _set(self.cost_per_hour, namespace, name, cost_per_hour)


def _swap_seconds(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "quire_operator_swap_seconds",
        "From the decision that another LLMDeployment of a pool gets the shared accelerator until its pod is "
        "ready.",
        ["namespace", "pool"],
        buckets=_SWAP_BUCKETS,
        registry=registry,
    )


def _set(gauge: Gauge, namespace: str, name: str, value: float | None) -> None:
    if value is None:
        gauge.remove(namespace, name)  # no error where it was never set
    else:
        gauge.labels(namespace, name).set(value)


@asynccontextmanager
async def serve(metrics: Metrics, port: int, health: Callable[[], str]) -> AsyncIterator[None]:
    """Answer /metrics, /healthz and /readyz while the block runs. `health`: what is wrong, or empty."""

    async def show_metrics(_: web.Request) -> web.Response:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def show_health(_: web.Request) -> web.Response:
        wrong = health()
        return web.Response(text=f"{wrong or 'ok'}\n", status=500 if wrong else 200)

    async def show_readiness(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")  # a standby replica is ready to take over

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", show_metrics),
            web.get("/healthz", show_health),
            web.get("/readyz", show_readiness),
        ]
    )
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()
        yield
    finally:
        await runner.cleanup()
