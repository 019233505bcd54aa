"""The chart's dashboard: its layout, and each query against a Prometheus that scraped a real server, a real
gateway, a real quire-batch and the operator's own metrics.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from e2e.cluster import prometheus
from e2e.ports import free_port
from quire_operator import metrics as operator_metrics
from quire_operator.metrics import Metrics
from tests.batch.launch import Batch, Signer, close_clients, line, sdk, submit, wait_over, write_keys
from tests.batch.stub_gateway import StubGateway
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server.launch import NO_TLS, Server

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "charts/quire/files/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
# The test machine has no GPU.
GPU_QUERIES = {name: expression for name, expression in QUERIES.items() if "llm_gpu_" in expression}
SERVER_QUERIES = {name: expression for name, expression in QUERIES.items() if name not in GPU_QUERIES}
QUANTILE = re.compile(r"histogram_quantile\(([0-9.]+)")
VARIABLES = {"$namespace": "team-a", "$llmdeployment": ".*", "$__rate_interval": "1m"}
ASK = {"model": "tiny", "prompt": "Once upon a time, " * 10, "max_tokens": 20, "ignore_eos": True}


class Prometheus:
    """A Prometheus that scrapes a server twice a second, with the labels of the chart's PodMonitor."""

    def __init__(self, directory: Path, model: str, operator: str, gateway: str, batch: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        labels = {"namespace": "team-a", "llmdeployment": "tiny", "pod": "tiny-0"}
        operators = {"namespace": "quire-system", "pod": "quire-operator-0"}
        gateways = {"namespace": "quire-system", "pod": "quire-gateway-0"}
        batches = {"namespace": "quire-system", "pod": "quire-batch-0"}
        jobs = [
            {"job_name": "models", "static_configs": [{"targets": [model], "labels": labels}]},
            {"job_name": "gateway", "static_configs": [{"targets": [gateway], "labels": gateways}]},
            {"job_name": "batch", "static_configs": [{"targets": [batch], "labels": batches}]},
            {
                "job_name": "operator",
                "honor_labels": True,
                "static_configs": [{"targets": [operator], "labels": operators}],
            },
        ]
        config = directory / "prometheus.yml"
        times = {"scrape_interval": "500ms", "scrape_timeout": "400ms"}
        config.write_text(yaml.safe_dump({"global": times, "scrape_configs": jobs}))
        program = prometheus.unpack(ROOT / ".cluster") / "prometheus"
        command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
        with (directory / "prometheus.log").open("wb") as log:
            command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def query_api(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60, verify=NO_TLS)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """The present value of each series of the expression."""
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        return [float(one["value"][1]) for one in self.query_api("query", query=expression)["result"]]


@contextmanager
def operator_that_reconciles() -> Iterator[str]:
    """An operator that reconciles ten times a second while the block runs; the address of its metrics."""
    metrics, port, stop = Metrics(), free_port(), threading.Event()
    metrics.leader.set(1)
    metrics.watch_stale.labels("Pod").set(0)
    metrics.set_cost("team-a", "tiny", 4.98)

    async def serve() -> None:
        async with operator_metrics.serve(metrics, port, str):
            while not stop.is_set():
                metrics.reconciles.labels("changed").inc()
                metrics.reconcile_seconds.observe(0.02)
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(60)


@contextmanager
def gateway_before(server: Server, directory: Path) -> Iterator[Gateway]:
    """A gateway to the server, to a replica that is gone, and to a model that is scaled to zero."""
    asleep = {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}
    route = {
        "models": ["chat"],
        "rules": [{"targets": [{"deployment": "asleep"}]}],
        "fallbacks": [{"deployment": "tiny"}],
        "hold": {"maxSeconds": 1},
    }
    with KubeStub() as kube:
        kube.put(endpoint_slice("a", {"one": "127.0.0.1"}, port=server.port, health_port=server.health_port))
        kube.put(endpoint_slice("b", {"gone": "127.0.0.1"}, port=free_port()))
        kube.put(llm_object("LLMDeployment", "tiny", {}))
        kube.put(llm_object("LLMDeployment", "asleep", {"model": {"servedName": "tiny"}, **asleep}))
        kube.put(llm_object("LLMRoute", "chat", route))
        with Gateway(kube.url, directory, POD_NAMESPACE=NAMESPACE, POD_NAME="g") as gateway:
            yield gateway.wait_replicas(2)


@contextmanager
def batches_before(directory: Path) -> Iterator[tuple[Batch, OpenAI]]:
    """A quire-batch before a gateway that is a stub, and a client of it."""
    keys = write_keys(directory / "keys")
    with StubGateway() as stub, Batch(stub.url, keys, directory / "batches") as batch:
        yield batch.wait_ready(), sdk(batch, Signer(keys))
        close_clients()


@pytest.fixture(scope="module")
def scraped(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("scraped")
    with (
        Server(tiny, directory, "--tensor-parallel-size", "2") as server,
        operator_that_reconciles() as operator,
        ExitStack() as opened,
    ):
        server.wait_ready()
        gateway = opened.enter_context(gateway_before(server, directory))
        batch, client = opened.enter_context(batches_before(directory))
        addresses = [f"127.0.0.1:{each.port}" for each in (server, gateway, batch)]
        running = Prometheus(directory, addresses[0], operator, *addresses[1:])
        try:
            _wait_for("the first scrape", running, 'llm_requests_total{status="success"}', 0)
            for _ in range(3):
                assert server.post("/v1/completions", ASK).status_code == 200
            assert server.post("/v1/completions", {**ASK, "max_tokens": -1}).status_code == 400
            _wait_for("the requests", running, "sum(increase(llm_requests_total[1m]))", 3)
            ask_through(gateway, 0)
            # A rate is of what comes after the first sample of a series.
            _wait_for(
                "its series", running, "count(gateway_fallbacks_total) + count(gateway_retries_total)", 2
            )
            ask_through(gateway, 1000)
            _wait_for("the gateway", running, "sum(increase(gateway_requests_total[1m]))", 8)
            _wait_for("quire-batch", running, "sum(batch_open_batches)", 0)
            assert wait_over(client, submit(client, line(1), line(2)).id).request_counts.completed == 2
            _wait_for("its lines", running, "sum(increase(batch_lines_total[1m]))", 1)
            _wait_for("the operator", running, "sum(increase(quire_operator_reconcile_total[1m]))", 1)
            yield running
        finally:
            running.process.kill()
            running.process.wait(10)


def ask_through(gateway: Gateway, first: int) -> None:
    """Until a prompt went to the replica that is gone first; one more asks for the model without pods."""

    def ask(name: str, number: int) -> None:
        body = {**ASK, "model": name, "prompt": f"{number} {ASK['prompt']}"}
        assert gateway.post("/v1/completions", body).status_code == 200

    def num_retries() -> float:
        lines = httpx.get(f"{gateway.url}/metrics", verify=NO_TLS).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("gateway_retries_total{"))

    ask("chat", first)
    before = num_retries()
    for number in range(first, first + 200):
        ask("tiny", number)
        if num_retries() > before and number >= first + 8:
            return
    raise AssertionError("no request went to the replica that is gone")


def _wait_for(what: str, running: Prometheus, expression: str, more_than: float) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if any(value >= more_than for value in running.values(expression)):
                return
        except (httpx.TransportError, AssertionError):
            pass
        assert time.monotonic() < end and running.process.poll() is None, f"not within a minute: {what}"
        time.sleep(0.1)


# One test of all queries: workers that share the tests of this file each start all that is scraped.
def test_no_panel_of_a_server_that_answers_is_empty(scraped: Prometheus) -> None:
    found = {query: scraped.values(query) for query in SERVER_QUERIES.values()}

    assert [query for query, values in found.items() if not values] == []
    assert {query: values for query, values in found.items() if not all(one >= 0 for one in values)} == {}


def test_the_queries_of_gpu_panels_are_valid(scraped: Prometheus) -> None:
    assert {query: scraped.values(query) for query in GPU_QUERIES.values()} == dict.fromkeys(
        GPU_QUERIES.values(), []
    )


def test_the_variables_list_the_scraped_namespaces_and_models(scraped: Prometheus) -> None:
    offered = {}
    for variable in DASHBOARD["templating"]["list"][1:]:
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        selector = series.replace("$namespace", "team-a")
        found = scraped.query_api("series", **{"match[]": selector})
        offered[variable["name"]] = {one[label] for one in found}

    assert offered == {"namespace": {"team-a"}, "llmdeployment": {"tiny"}}


def test_the_panels_show_what_an_hour_and_a_million_tokens_cost(scraped: Prometheus) -> None:
    assert scraped.values(QUERIES["Cost per hour A"]) == [4.98]
    assert max(scraped.values(QUERIES["Cost per million tokens A"])) > 0


def test_every_latency_is_shown_with_its_median_p95_and_p99() -> None:
    percentiles = [
        [float(number) for target in panel["targets"] for number in QUANTILE.findall(target["expr"])]
        for panel in PANELS
        if "p50" in panel["description"]
    ]
    assert len(percentiles) >= 4 and all(each == [0.5, 0.95, 0.99] for each in percentiles)
    assert QUANTILE.findall(QUERIES["TTFT p95 A"]) == ["0.95"]


def test_the_panels_show_the_requests_that_were_sent(scraped: Prometheus) -> None:
    assert 0 < max(scraped.values(QUERIES["Prefix cache hit rate A"])) < 1
    assert max(scraped.values(QUERIES["Tokens per second B"])) > 0
    assert 0 < max(scraped.values(QUERIES["TTFT p50 A"])) < 60


def test_the_panels_of_ranks_show_each_rank_of_a_divided_model(scraped: Prometheus) -> None:
    for panel in ("Busy ranks A", "Bytes between ranks A"):
        assert len([value for value in scraped.values(QUERIES[panel]) if value > 0]) == 2, panel
    assert len(scraped.values(QUERIES["Silence of ranks A"])) == 2
    assert all(value < 1 for value in scraped.values(QUERIES["Busy ranks A"])), "waits are no work"


def test_panels_have_a_unit_a_description_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"])


def test_counters_and_histograms_are_shown_as_rates_and_no_data_source_is_hard_coded() -> None:
    """The average since the start of a process cannot show an incident."""
    for name, expression in QUERIES.items():
        for metric in re.findall(r"\b\w[\w:]*_(?:total|bucket|sum|count)\b", expression):
            assert f"rate({metric}" in expression, name
        of_all = re.search(r"\b(quire_operator|gateway|batch)_", expression)  # without labels of one
        assert of_all or ("$namespace" in expression and "$llmdeployment" in expression), name
    sources = set(re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD))) - {DASHBOARD["uid"]}
    assert sources == {"${datasource}"}
