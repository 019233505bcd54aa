"""Reports the ends of jobs to their webhooks: signed, a few times, and never where a redirect points to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
from yarl import URL

from quire_batch import objects, webhook
from quire_batch.metrics import Metrics
from quire_batch.patience import Patience
from quire_batch.records import Batch
from quire_batch.settings import Settings
from quire_batch.store import Store

logger = logging.getLogger(__name__)

_SECONDS = 15.0
_AGAIN_SECONDS = 60.0  # after which another worker sends what this one did not say it has sent
_IDLE_SECONDS = 1.0


class WebhookSender:
    """That of one worker."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        settings: Settings,
        patience: Patience,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._settings = settings
        self._patience = patience
        self._clock = clock

    async def run(self) -> None:
        """Until it is cancelled."""
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                now = self._clock()
                due = await self._patience.call(self._store.take_webhook, now, now + _AGAIN_SECONDS)
                if due is None:
                    await asyncio.sleep(_IDLE_SECONDS)  # another worker may have ended a job
                else:
                    await self._report(session, *due)

    async def _report(self, session: aiohttp.ClientSession, job: Batch, failures: int) -> None:
        line = await self._patience.call(self._store.result, job.id)
        body = webhook.body(job.id, objects.job_status(job, line), self._clock())
        why = await self._send(session, job, body)
        again_at = None
        if why:
            failures += 1
            delay = webhook.delay(failures)
            again_at = None if delay is None else self._clock() + delay
            logger.warning("webhook failed", extra={"job": job.id, "why": why, "given_up": delay is None})
        self._metrics.webhooks.labels("failed" if why else "delivered").inc()
        await self._patience.call(self._store.webhook_tried, job.id, failures, again_at)

    async def _send(self, session: aiohttp.ClientSession, job: Batch, body: bytes) -> str:
        """Why it failed, empty where it did not."""
        if webhook.origin(job.webhook) not in self._settings.webhooks:
            return "its origin is not allowed any more"
        headers = webhook.headers(self._settings.webhook_secret, job.id, self._clock(), body)
        try:
            async with session.post(
                URL(job.webhook, encoded=True), data=body, headers=headers, allow_redirects=False
            ) as response:
                return "" if 200 <= response.status < 300 else f"HTTP {response.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return repr(error)
