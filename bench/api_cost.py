"""What a change of the API process costs: `python -m bench.api_cost OTHER`, with OTHER another checkout.

Both checkouts serve the same tiny model side by side, so that the model costs next to nothing and the API
shows; load goes to one of them at a time, in pairs in turns. Printed: the time until a server is ready, the
latency of whole answers at a steady rate, the throughput of streams, the memory of the API process. The other
checkout runs in this one's environment, so it must not need a package that this one lacks.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import http_load
from tests.server import tiny_model
from tests.server.launch import Server

ROOT = Path(__file__).resolve().parent.parent
RATE, UNARY_SECONDS, UNARY_CLIENTS = 200.0, 8, 32
STREAMS, STREAM_REQUESTS, STREAM_TOKENS = 32, 128, 128
STARTS = 5
_FLAGS = ("--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "64")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.api_cost", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with (before)")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of each measurement")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.other.resolve(), "after": ROOT}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.write(Path(folder) / "tiny")
        _report("server ready, s", _starts(checkouts, model, Path(folder)), _difference)
        with _servers(checkouts, model, Path(folder)) as servers:
            loads = {name: _load(server, model) for name, server in servers.items()}
            _in_turns(loads, 2, _unary)  # warms up
            unary = _in_turns(loads, arguments.rounds, _unary)
            _report(f"whole answers at {RATE:.0f}/s, p50, ms", _figures(unary, _p50_ms), _difference)
            _report("CPU of the API process, ms a request", _figures(unary, _cpu_ms), _difference)
            streamed = _in_turns(loads, arguments.rounds, _streamed)
            _report(f"{STREAMS} streams, tokens/s", _figures(streamed, _tokens_per_second), _ratio)
            memory = {name: [_resident_mib(load.processes["api"])] for name, load in loads.items()}
            _report("memory of the API process, MiB", memory, _difference)


@contextmanager
def _servers(checkouts: dict[str, Path], model: Path, folder: Path) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(_serve(path, model, folder)) for name, path in checkouts.items()}


@contextmanager
def _serve(checkout: Path, model: Path, folder: Path) -> Iterator[Server]:
    packages = os.pathsep.join(str(checkout / name) for name in ("server", "kernels", "operator"))
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        Server(model, Path(own), *_FLAGS, PYTHONPATH=packages) as server,
    ):
        yield server.wait_ready()


def _starts(checkouts: dict[str, Path], model: Path, folder: Path) -> dict[str, list[float]]:
    """Seconds from the program's start to readiness, without the first, which compiles Python."""
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(STARTS + 1):
        for name, checkout in checkouts.items():
            began = time.monotonic()
            with _serve(checkout, model, folder):
                seconds[name].append(time.monotonic() - began)
    return {name: values[1:] for name, values in seconds.items()}


def _load(server: Server, model: Path) -> http_load.Load:
    prompts = [f"request {number}" for number in range(STREAM_REQUESTS)]
    return http_load.Load(server.port, model, "tiny", STREAMS, prompts, STREAM_TOKENS, server.children())


def _in_turns(
    loads: dict[str, http_load.Load], rounds: int, run: Callable[[http_load.Load], http_load.Run]
) -> dict[str, list[http_load.Run]]:
    runs: dict[str, list[http_load.Run]] = {name: [] for name in loads}
    for number in range(rounds):
        for name in list(loads) if number % 2 else list(loads)[::-1]:
            runs[name].append(run(loads[name]))
    return runs


def _figures(
    runs: dict[str, list[http_load.Run]], figure: Callable[[http_load.Run], float]
) -> dict[str, list[float]]:
    return {name: [figure(run) for run in mine] for name, mine in runs.items()}


def _unary(load: http_load.Load) -> http_load.Run:
    """Answers of one token at a steady rate."""
    prompts = [f"request {number}" for number in range(int(RATE * UNARY_SECONDS))]
    one_token = http_load.Load(
        load.port, load.model, load.served_name, UNARY_CLIENTS, prompts, 1, load.processes
    )
    return http_load.bare(one_token, stream=False, rate=RATE)


def _streamed(load: http_load.Load) -> http_load.Run:
    return http_load.bare(load, stream=True)


def _p50_ms(run: http_load.Run) -> float:
    return 1e3 * statistics.median(run.latencies)


def _cpu_ms(run: http_load.Run) -> float:
    return 1e3 * run.cpu["api"] / len(run.latencies)


def _tokens_per_second(run: http_load.Run) -> float:
    return STREAM_REQUESTS * STREAM_TOKENS / run.seconds


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _report(what: str, values: dict[str, list[float]], compare: Callable[[float, float], float]) -> None:
    """Medians, and the median of what the pairs say: the machine changes between them."""
    before, after = values["before"], values["after"]
    pairs = statistics.median(compare(*pair) for pair in zip(before, after, strict=True))
    medians = " -> ".join(f"{statistics.median(one):.2f}" for one in (before, after))
    sign, unit = ("", "x") if compare is _ratio else ("+", "")
    print(f"{what}: {medians}; {len(before)} pairs: {pairs:{sign}.3f}{unit}", flush=True)


def _difference(before: float, after: float) -> float:
    return after - before


def _ratio(before: float, after: float) -> float:
    return after / before


if __name__ == "__main__":
    main()
