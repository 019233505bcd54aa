"""What the metrics adapter costs with many pods: `python -m bench.adapter`.

A real API server with its aggregator, the adapter's process with the rights of the chart, and one process
that answers for all pods, each at a loopback address of its own, with a page as long as a GPU server's. CPU
seconds of the adapter are counted over SECONDS; meanwhile each LLMDeployment's queue is asked for through the
aggregator as often as autoscalers would ask.
"""

from __future__ import annotations

import http.server
import multiprocessing
import socketserver
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.process_cpu import used
from e2e.metrics_adapter.cluster import Cluster, aggregated
from e2e.metrics_adapter.engines import make_pod
from e2e.metrics_adapter.replica import SERVICE, AdapterReplica
from e2e.operator import rights
from e2e.operator.world import World
from e2e.ports import free_port
from e2e.waiting import eventually
from quire_server.core.stats import EngineStats
from quire_server.metrics.gpu import GpuSample
from quire_server.metrics.requests import Metrics

PODS = 300
DEPLOYMENTS = 60
SECONDS = 60.0
ASK_SECONDS = 15.0  # how often an autoscaler asks
NAMESPACE = "bench"


def main() -> None:
    """Print one table."""
    page = _page()
    port = free_port()
    engines = multiprocessing.get_context("spawn").Process(target=_answer, args=(port, page), daemon=True)
    engines.start()
    with _cluster(port) as (cluster, replica):
        _make_pods(cluster.world)
        eventually("all pods answer", lambda: _successes(replica) >= 2 * PODS, seconds=120)
        eventually("a queue", lambda: cluster.value(NAMESPACE, "m0") == str(PODS // DEPLOYMENTS), seconds=60)
        before, began, scraped = used(replica.pid), time.monotonic(), _successes(replica)
        times = _ask(cluster, began + SECONDS)
        seconds = time.monotonic() - began
        cpu, scrapes = used(replica.pid) - before, _successes(replica) - scraped
        figures = replica.metrics()
        memory = _peak_megabytes(replica.pid)
    engines.kill()
    mean = figures["quire_metrics_adapter_scrape_seconds_sum"] / _successes_of(figures)
    quick = figures['quire_metrics_adapter_scrape_seconds_bucket{le="0.5"}'] / _successes_of(figures)
    print(f"{PODS} pods of {DEPLOYMENTS} LLMDeployments, pages of {len(page)} bytes, {seconds:.0f} s")
    print(f"CPU of the adapter: {100 * cpu / seconds:.1f} % of a core, {1e3 * cpu / scrapes:.2f} ms a scrape")
    print(f"scrapes: {scrapes / seconds:.0f} /s, mean {1e3 * mean:.0f} ms, {100 * quick:.1f} % within 500 ms")
    median, late = statistics.median(times), statistics.quantiles(times, n=100)[98]
    print(
        f"a value through the aggregator: p50 {1e3 * median:.1f} ms, p99 {1e3 * late:.1f} ms of {len(times)}"
    )
    print(f"peak memory: {memory:.0f} MiB")


def _page() -> bytes:
    metrics = Metrics("model")
    metrics.step(EngineStats(waiting=1, deferred=0, running=4, kv_utilization=0.25))
    metrics.gpus.take(tuple(GpuSample(str(i), {"used": 1, "free": 1}, 0.5) for i in range(8)))
    return metrics.exposition("text/plain;version=0.0.4")[0]


def _answer(port: int, page: bytes) -> None:
    """Every address of the loopback network leads here."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = PODS

    Server(("0.0.0.0", port), Handler).serve_forever()


@contextmanager
def _cluster(engine_port: int) -> Iterator[tuple[Cluster, AdapterReplica]]:
    with tempfile.TemporaryDirectory() as name, aggregated(engine_port) as cluster:
        cluster.world.namespace(NAMESPACE)
        directory = Path(name)
        kubeconfig = rights.token_kubeconfig(cluster.server, cluster.world, SERVICE, directory / "kubeconfig")
        replica = AdapterReplica("adapter", kubeconfig, directory, engine_port).start()
        cluster.stack.callback(replica.stop)
        cluster.service.backends = [replica.wait_ready().https_port]
        cluster.wait_available()
        yield cluster, replica


def _make_pods(world: World) -> None:
    for number in range(PODS):
        make_pod(world, NAMESPACE, f"m{number % DEPLOYMENTS}", f"127.9.{number // 250}.{1 + number % 250}")


def _ask(cluster: Cluster, until: float) -> list[float]:
    """Seconds that each question took; every LLMDeployment's is asked every ASK_SECONDS, five at a time."""
    times: list[float] = []

    def ask(name: str) -> float:
        began = time.monotonic()
        assert cluster.value(NAMESPACE, name) == str(PODS // DEPLOYMENTS)
        return time.monotonic() - began

    with ThreadPoolExecutor(5) as pool:
        while (began := time.monotonic()) < until:
            times += pool.map(ask, [f"m{number}" for number in range(DEPLOYMENTS)])
            time.sleep(max(0.0, began + ASK_SECONDS - time.monotonic()))
    return times


def _successes(replica: AdapterReplica) -> float:
    return _successes_of(replica.metrics())


def _successes_of(figures: dict[str, float]) -> float:
    return figures.get('quire_metrics_adapter_scrapes_total{result="success"}', 0.0)


def _peak_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
