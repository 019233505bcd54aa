"""Assembles one replica: which tasks run, in which order they start, and what ends them.

A replica has no persistent state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from quire_metrics_adapter import load_api, pods
from quire_metrics_adapter import metrics as own_metrics
from quire_metrics_adapter.delegated_auth import DelegatedAuth
from quire_metrics_adapter.kube_api import Connection
from quire_metrics_adapter.listener import Listener
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.mounted_certificate import MountedPair
from quire_metrics_adapter.owners import Owners
from quire_metrics_adapter.pods import PodTable
from quire_metrics_adapter.publisher import Publisher
from quire_metrics_adapter.scraper import Scraper
from quire_metrics_adapter.server import MetricsApi
from quire_metrics_adapter.settings import Settings
from quire_operator.unreadable import UnreadableObjects

logger = logging.getLogger(__name__)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM. Raises AdapterError for what no retry can fix."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    metrics = Metrics()
    connection = await Connection.open(report=UnreadableObjects(metrics.unreadable_objects))
    try:
        await _Replica(connection, settings, metrics).run(stop)
    finally:
        await connection.close()


class _Replica:
    def __init__(self, connection: Connection, settings: Settings, metrics: Metrics) -> None:
        self._connection = connection
        self._settings = settings
        self._metrics = metrics
        self._table = PodTable()
        self._guard = DelegatedAuth(connection)
        self._scraper = Scraper(self._table, self._metrics, port=settings.engine_port)
        self._certificate: Publisher | MountedPair = (
            MountedPair(settings.tls_directory)
            if settings.tls_directory is not None
            else Publisher(connection, settings)
        )
        self._is_ending = False

    async def run(self, stop: asyncio.Event) -> None:
        api = MetricsApi(self._connection, self._guard, self._table, self._scraper, self._metrics)
        runner = api.runner()
        await runner.setup()
        listener = Listener(runner, self._settings.port)

        def serve() -> None:
            proxy = self._guard.front_proxy
            listener.serve(self._certificate.credentials, proxy.authority if proxy else "")
            self._metrics.renewals.inc()

        loads = load_api.routes(self._table, self._scraper)
        try:
            async with own_metrics.serve(self._metrics, self._settings.probe_port, self._unready, loads):
                serve()
                await self._work(
                    stop,
                    listener.run(),
                    self._guard.follow(serve),
                    self._certificate.run(serve),
                    pods.watch(self._connection, Owners(self._connection), self._table),
                    self._scraper.run(),
                )
        finally:
            listener.close()
            await runner.cleanup()

    async def _work(self, stop: asyncio.Event, *works: Coroutine[Any, Any, None]) -> None:
        """Until SIGTERM, or until one of `works`, which never end by themselves, fails."""
        tasks = [asyncio.create_task(work) for work in works]
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        self._is_ending = True
        for task in (*tasks, stopped):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    def _unready(self) -> str:
        if self._is_ending:
            return "ending"
        if not self._certificate.published:
            return "the certificate authority is not published yet"
        if not self._guard.known:
            return "the API server's front proxy is not known yet"
        return "" if self._table.known else "which pods are ready is not known"
