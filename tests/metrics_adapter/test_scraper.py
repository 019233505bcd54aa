"""A pod that does not answer has no load, is asked again each period, and costs the log one line."""

from __future__ import annotations

import asyncio

import pytest

from e2e.ports import free_port
from quire_metrics_adapter import scraper
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.scraper import Scraper
from tests.metrics_adapter.test_load_api import table
from tests.metrics_adapter.test_pods import pod


async def test_a_pod_that_does_not_answer_is_asked_again_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scraper, "PERIOD_SECONDS", 0.02)
    metrics, pods = Metrics(), table(pod("a", ip="127.0.0.1"))
    scraping = Scraper(pods, metrics, port=free_port())
    running = asyncio.create_task(scraping.run())
    failed = metrics.scrapes.labels(result="error")
    async with asyncio.timeout(60):
        while failed._value.get() < 3:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert scraping.samples == {}
    assert caplog.text.count("no load from a pod of team-a/chat") == 1
