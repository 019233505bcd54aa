"""KEDA gets a number or an error, and 0 only for a deployment that is scaled to zero."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from quire_metrics_adapter.load import LoadSample
from quire_metrics_adapter.load_api import routes
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.pods import PodTable
from quire_metrics_adapter.scraper import Scraper
from tests.metrics_adapter.test_pods import pod

NOW = 100.0


async def ask(table: PodTable, samples: dict[str, float], path: str) -> tuple[int, Any]:
    scraper = Scraper(table, Metrics(), port=8000)
    scraper.samples = {
        uid: LoadSample(NOW, dict.fromkeys(("llm_queue_depth", "llm_prefill_queue_depth"), value))
        for uid, value in samples.items()
    }
    app = web.Application()
    app.add_routes(routes(table, scraper, clock=lambda: NOW))
    async with TestClient(TestServer(app)) as client:
        answer = await client.get(f"/load/team-a/chat/{path}")
        return answer.status, await answer.json()


def table(*bodies: dict[str, Any]) -> PodTable:
    made = PodTable(clock=lambda: NOW)
    made.replace(list(bodies))
    made.connected(True)
    return made


async def test_a_load_is_the_sum_over_the_ready_pods() -> None:
    pods = table(pod("a"), pod("b"), pod("c", ready=False), pod("d", deployment="other"))
    assert await ask(pods, {"a": 3, "b": 4, "d": 9}, "llm_queue_depth") == (200, {"llm_queue_depth": 7})


async def test_the_queue_of_prefill_pods_is_no_part_of_the_queue_of_decode_pods() -> None:
    prefill = pod("p")
    prefill["metadata"]["labels"]["serving.quire.dev/role"] = "prefill"
    pods = table(pod("a"), prefill)
    for metric, wanted in (("llm_queue_depth", 3), ("llm_prefill_queue_depth", 9)):
        assert await ask(pods, {"a": 3, "p": 9}, metric) == (200, {metric: wanted})
    assert (await ask(table(pod("a")), {"a": 3}, "llm_prefill_queue_depth"))[0] == 404, "not 0"


@pytest.mark.parametrize("query", ["", "?ifNone=0"])
async def test_an_unknown_load_is_an_error_and_never_0(query: str) -> None:
    unknown = PodTable(clock=lambda: NOW)
    going = pod("a", deletionTimestamp="2026-01-01T00:00:00Z")

    assert (await ask(table(pod("a"), pod("b")), {"a": 3}, f"llm_queue_depth{query}"))[0] == 503
    assert (await ask(unknown, {}, f"llm_queue_depth{query}"))[0] == 503
    assert (await ask(table(pod("a", ready=False)), {}, f"llm_queue_depth{query}"))[0] == 404, "it loads"
    assert (await ask(table(going), {}, f"llm_queue_depth{query}"))[0] == 404, "it drains"
    assert (await ask(table(pod("a")), {"a": 3}, f"llm_secrets{query}"))[0] == 404


async def test_no_pods_are_zero_load_only_with_if_none_and_else_a_404() -> None:
    evicted = pod("a", ready=False)
    evicted["status"]["phase"] = "Failed"
    gone = table(pod("a"))
    gone.remove(pod("a"))

    for none in (table(), table(evicted), gone):
        assert (await ask(none, {}, "llm_queue_depth"))[0] == 404
        assert await ask(none, {}, "llm_queue_depth?ifNone=0") == (200, {"llm_queue_depth": 0})
