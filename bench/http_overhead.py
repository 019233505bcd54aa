"""The engine's speed behind HTTP with 32 clients, compared with the engine in this process (a section of
``bench.cpu``).

Prompts of one length go alternately to the engine in this process and to a real ``quire-server serve`` on the
loopback interface with the same settings and threads, with guidellm and with a minimal client, streaming and
not. All of them share the machine's CPUs, so a load generator takes time from the engine: the table has CPU
seconds by process beside tokens per second.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import http_load, http_plot, process_cpu
from bench.engine import CONTEXT, Quire
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.text.tokenizer import Tokenizer
from tests.server.launch import Server

RESULTS = Path(__file__).parent / "results"
CLIENTS, REQUESTS, PROMPT, NEW, ROUNDS = 32, 64, 128, 128, 3
QUANTIZATION = "int8"
CHUNK = 512  # the server's default
NAME = "smollm2"
DISTURBED = 0.15  # share of one CPU used by other processes, above which a round is not counted
_MINE = time.CLOCK_PROCESS_CPUTIME_ID
Loads = dict[str, Callable[[http_load.Load], http_load.Run]]
BARE: Loads = {
    "HTTP, streaming, bare client": lambda load: http_load.bare(load, stream=True),
    "HTTP, whole answers, bare client": lambda load: http_load.bare(load, stream=False),
}
LOADS: Loads = {
    **BARE,
    "HTTP, streaming, guidellm": lambda load: http_load.guidellm(load, stream=True),
    "HTTP, whole answers, guidellm": lambda load: http_load.guidellm(load, stream=False),
}
DIRECT = "in process"
PROCESSES = ("engine", "api", "client")
LATENCIES = {
    "time to the first token": "time_to_first_token_ms",
    "between two tokens (ITL), mean of a request": "inter_token_latency_ms",
    "a token, of the whole request (TPOT)": "time_per_output_token_ms",
    "whole request": "request_latency",
}


def texts(tokenizer: Tokenizer, seed: str) -> list[str]:
    """Random texts of exactly PROMPT tokens: no two share a prefix."""
    rng, found = random.Random(seed), list[str]()
    while len(found) < REQUESTS:
        text = tokenizer.decode([rng.randrange(1000, 40000) for _ in range(PROMPT)])
        text = tokenizer.decode(tokenizer.encode(text)[:PROMPT])
        if len(tokenizer.encode(text)) == PROMPT and "\ufffd" not in text:
            found.append(text)
    return found


def in_process(engine: Quire, prompts: list[list[int]], clients: int = CLIENTS) -> http_load.Run:
    """Scheduler and runner alone: when an answer is complete, the next prompt is added."""
    scheduler, waiting = engine.scheduler(chunk=CHUNK, prefix_caching=True), list(enumerate(prompts))[::-1]

    def admit() -> None:
        if waiting:
            number, prompt = waiting.pop()
            sampling = SamplingParams(NEW, temperature=0.0)
            scheduler.add(Request(str(number), tuple(prompt), sampling, arrival=float(number)))

    for _ in range(clients):
        admit()
    start, cpu, everybody = time.monotonic(), time.clock_gettime(_MINE), process_cpu.busy()
    while (step := scheduler.schedule()) is not None:
        for event in scheduler.commit(step, engine.runner.run(step)).events:
            if event.finish_reason is not None:
                admit()
    seconds, mine = time.monotonic() - start, time.clock_gettime(_MINE) - cpu
    return http_load.Run(seconds, {"engine": mine, "others": process_cpu.busy() - everybody - mine})


def http_overhead(directory: Path) -> str:
    """All load generators; their figures and percentiles become files, too."""
    return _report(_measured(directory, LOADS, QUANTIZATION, CLIENTS))


def http_rates(directory: Path, *, quantization: str, clients: int) -> str:
    """Throughput with the minimal client alone."""
    runs, rounds = _counted(_measured(directory, BARE, quantization, clients))
    return f"{_throughput(runs, clients)}\n\n{rounds}"


def _measured(
    directory: Path, loads: Loads, quantization: str, clients: int
) -> dict[str, list[http_load.Run]]:
    engine = Quire(directory, dtype="auto", quantization=quantization)
    tokenizer = Tokenizer.load(directory)
    runs: dict[str, list[http_load.Run]] = {DIRECT: [], **{name: [] for name in loads}}
    flags = ("--served-model-name", NAME, "--quantization", quantization, "--max-num-seqs", str(clients))
    sizes = ("--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(3 << 30))
    with tempfile.TemporaryDirectory() as folder:
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with Server(directory, Path(folder), *flags, *sizes, **threads) as server:
            server.wait_ready()
            children = server.children()

            def load(seed: str) -> http_load.Load:
                """Prompts of its own: none finds another one's in the prefix cache."""
                prompts = texts(tokenizer, seed)
                return http_load.Load(server.port, directory, NAME, clients, prompts, NEW, children)

            for number in range(ROUNDS + 1):  # the first one warms up
                prompts = [tokenizer.encode(text) for text in texts(tokenizer, f"{number} {DIRECT}")]
                direct = in_process(engine, prompts, clients)
                if number == 0:
                    http_load.bare(load("warm up"), stream=True)
                    continue
                runs[DIRECT].append(direct)
                for name, run in loads.items():
                    runs[name].append(run(load(f"{number} {name}")))
    return runs


def _quiet(runs: dict[str, list[http_load.Run]]) -> list[int]:
    """The rounds in which other processes used little CPU; all of them if there are none."""
    rounds = range(len(runs[DIRECT]))
    calm = [
        i
        for i in rounds
        if all(mine[i].cpu["others"] <= DISTURBED * mine[i].seconds for mine in runs.values())
    ]
    return calm or list(rounds)


def _counted(every: dict[str, list[http_load.Run]]) -> tuple[dict[str, list[http_load.Run]], str]:
    """The rounds that count, and how many these are."""
    counted = _quiet(every)
    runs = {name: [mine[i] for i in counted] for name, mine in every.items()}
    others = max(run.cpu["others"] / run.seconds for mine in runs.values() for run in mine)
    return runs, (
        f"{len(counted)} of {len(every[DIRECT])} rounds count; other work on the machine took at most "
        f"{100 * others:.0f} % of one CPU in them."
    )


def _report(every: dict[str, list[http_load.Run]]) -> str:
    (RESULTS / "http.json").write_text(json.dumps(_figures(every), indent=1) + "\n")
    runs, rounds = _counted(every)
    requests = [one for run in runs["HTTP, streaming, guidellm"] for one in run.requests]
    gaps = [1e3 * gap for run in runs["HTTP, streaming, bare client"] for gap in run.gaps]
    latencies = {
        label: [one[name] * (1e3 if name == "request_latency" else 1) for one in requests]
        for label, name in LATENCIES.items()
    }
    latencies["between two chunks, each (bare client)"] = gaps
    (RESULTS / "http.svg").write_text(http_plot.percentiles(latencies))
    parts = _throughput(runs, CLIENTS), rounds, _latencies(latencies), "![percentiles](http.svg)"
    text = "\n\n".join(parts)
    (RESULTS / "http.md").write_text(f"# Through HTTP\n\n{text}\n")
    return text.replace("(http.svg)", "(../http.svg)")


def _throughput(runs: dict[str, list[http_load.Run]], clients: int) -> str:
    tokens, rows = REQUESTS * NEW, []
    direct = [run.seconds for run in runs[DIRECT]]
    for name, mine in runs.items():
        rate = statistics.median(tokens / run.seconds for run in mine)
        # Within each round, since the machine changes between them.
        lost = statistics.median(1 - d / run.seconds for d, run in zip(direct, mine, strict=True))
        cpu = {who: statistics.median(run.cpu.get(who, 0.0) for run in mine) for who in PROCESSES}
        share = statistics.median(run.cpu.get("client", 0.0) / run.seconds for run in mine)
        each = [f"{1e3 * cpu[who] / tokens:.3f}" if cpu[who] else "-" for who in PROCESSES]
        below = "-" if name == DIRECT else f"{100 * lost:.1f} %"
        rows.append([name, f"{rate:.0f}", below, *each, f"{100 * share:.0f} %" if cpu["client"] else "-"])
    heads = ["tok/s", "below in process", "engine", "API", "load generator", "of one CPU"]
    heads = [f"{clients} clients", *heads]
    return f"{_table(heads, rows)}\n\nEngine, API, load generator: CPU seconds per 1,000 new tokens."


def _latencies(latencies: dict[str, list[float]]) -> str:
    rows = [
        [label, *(f"{http_plot.quantile(values, share):.1f}" for share in http_plot.SHARES)]
        for label, values in latencies.items()
    ]
    return _table(["streaming, ms", *(f"p{100 * share:g}" for share in http_plot.SHARES)], rows)


def _figures(runs: dict[str, list[http_load.Run]]) -> dict[str, object]:
    """All measurements in their original units."""
    settings = {"clients": CLIENTS, "requests": REQUESTS, "prompt_tokens": PROMPT, "new_tokens": NEW}
    return {
        "settings": settings | {"threads": torch.get_num_threads()},
        "runs": {
            name: [
                {
                    "seconds": run.seconds,
                    "cpu_seconds": run.cpu,
                    "gap_ms": _gaps(run),
                    "requests": run.requests,
                }
                for run in mine
            ]
            for name, mine in runs.items()
        },
    }


def _gaps(run: http_load.Run) -> dict[str, float]:
    """Percentiles of milliseconds between two arrivals, if the client recorded them."""
    shares = http_plot.SHARES if run.gaps else ()
    return {f"p{100 * share:g}": 1e3 * http_plot.quantile(run.gaps, share) for share in shares}


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
