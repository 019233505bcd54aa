"""The aggregated API answers each failure with a Status that says whose it is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from e2e.failure_paths import import_hook
from quire_metrics_adapter.__main__ import EXIT_UNUSABLE
from quire_metrics_adapter.errors import ApiError, InvalidError, UnreachableError
from quire_metrics_adapter.metrics import Metrics
from quire_metrics_adapter.pods import PodTable
from quire_metrics_adapter.scraper import Scraper
from quire_metrics_adapter.server import MetricsApi

ALL = (
    "/apis/custom.metrics.k8s.io/v1beta2/namespaces/team-a/llmdeployments.serving.quire.dev/*/llm_queue_depth"
)


class Everyone:
    """Admits every caller to everything."""

    async def caller(self, peer: object) -> object:
        return peer

    async def allow(self, caller: object, query: object) -> None:
        return


class FailingApi:
    def __init__(self, error: ApiError) -> None:
        self._error = error

    async def request(self, method: str, path: str, **_: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UnreachableError("the database is gone"), 503, "cannot list llmdeployments: the database is gone"),
        (InvalidError("unable to parse"), 400, "labelSelector: unable to parse"),
    ],
)
async def test_a_list_that_the_api_server_fails_or_refuses_is_an_error_and_no_empty_list(
    error: ApiError, code: int, message: str
) -> None:
    table, metrics = PodTable(), Metrics()
    scraper = Scraper(table, metrics, port=8000)
    api = MetricsApi(FailingApi(error), Everyone(), table, scraper, metrics)  # type: ignore[arg-type]
    async with TestClient(TestServer(api.runner().app)) as client:
        answer = await client.get(ALL)
        body = await answer.json()

    assert (answer.status, body["kind"], body["message"]) == (code, "Status", message)


def test_a_setting_that_is_missing_ends_the_process_with_its_name_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire_metrics_adapter"],
        env={"PATH": os.environ["PATH"], **import_hook.environment("")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_UNUSABLE
    assert done.stderr.startswith("quire-metrics-adapter: ") and "POD_NAME" in done.stderr
    assert "Traceback" not in done.stderr
