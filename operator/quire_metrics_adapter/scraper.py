"""Scrapes the load of every ready pod: GET /metrics every five seconds, concurrently, with a deadline of one
second each.

A pod that has just become ready is scraped at once, so that the load of its deployment has no gap. A slow pod
delays no other. Responses are untrusted input: bounded in time and size here, parsed in `exposition`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable, Collection

import aiohttp

from quire_metrics_adapter import exposition
from quire_metrics_adapter.errors import HostileAnswerError
from quire_metrics_adapter.load import LoadSample
from quire_metrics_adapter.load_metrics import METRICS
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.pods import Pod, PodTable

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
ANSWER_SECONDS = 1.0
CONCURRENCY = 256
_CHUNK_BYTES = 1 << 16


class Scraper:
    """`samples`: the last sample of each ready pod, by uid."""

    def __init__(
        self,
        table: PodTable,
        metrics: Metrics,
        *,
        port: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.samples: dict[str, LoadSample] = {}
        self._table = table
        self._metrics = metrics
        self._port = port
        self._clock = clock
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._complained: set[str] = set()  # uids of failing pods: each failure is logged once

    async def run(self) -> None:
        """Scrape until cancelled."""
        # Pods are untrusted: no cookies, no redirects, no compression.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONCURRENCY),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
        ) as session:
            while True:
                next_round = self._clock() + PERIOD_SECONDS
                self._forget()
                await self._ask_all(session, self._table.all())
                while (left := next_round - self._clock()) > 0:
                    await self._ask_new(session, left)

    async def _ask_new(self, session: aiohttp.ClientSession, seconds: float) -> None:
        """Wait for at most that long; scrape pods that become ready in between."""
        try:
            async with asyncio.timeout(seconds):
                await self._table.changed.wait()
        except TimeoutError:
            return
        self._table.changed.clear()
        await self._ask_all(session, [pod for pod in self._table.all() if pod.uid not in self.samples])

    async def _ask_all(self, session: aiohttp.ClientSession, pods: Collection[Pod]) -> None:
        await asyncio.gather(*(self._ask(session, pod) for pod in pods))

    async def _ask(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        async with self._slots:
            asked_at = self._clock()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    values = exposition.parse(await fetch(session, pod.address, self._port), pod.role)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, HostileAnswerError) as error:
                self._metrics.scrapes.labels(result="error").inc()
                self._complain(pod, f"{type(error).__name__} {error}")
                return
        # Timestamped with the request, because the values may be that old.
        self.samples[pod.uid] = LoadSample(asked_at, values)
        self._metrics.scrapes.labels(result="success").inc()
        self._metrics.scrape_seconds.observe(self._clock() - asked_at)
        self._complained.discard(pod.uid)
        logger.debug("%s/%s at %s says %s of %d metrics", pod.namespace, pod.deployment, pod.address,
                     len(values), len(METRICS))  # fmt: skip

    def _complain(self, pod: Pod, why: str) -> None:
        if pod.uid not in self._complained:
            self._complained.add(pod.uid)
            logger.warning("no load from a pod of %s/%s: %s", pod.namespace, pod.deployment, why)

    def _forget(self) -> None:
        ready = {pod.uid for pod in self._table.all()}
        for uid in self.samples.keys() - ready:
            del self.samples[uid]
        self._complained &= ready
        self._metrics.pods.set(len(ready))


async def fetch(session: aiohttp.ClientSession, address: str, port: int) -> bytes:
    """The pod's /metrics, cut off just above the limit of the parser; ValueError for a status other than
    200.
    """
    host = ipaddress.ip_address(address)
    url = f"http://[{host}]:{port}/metrics" if host.version == 6 else f"http://{host}:{port}/metrics"
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        raw = bytearray()
        while len(raw) <= exposition.MAX_BYTES and (chunk := await answer.content.read(_CHUNK_BYTES)):
            raw += chunk
        return bytes(raw)
