"""Offered load against goodput: a replica that is limited by its KV cache, and open-loop clients that retry.

`python -m bench.overload [SECONDS [ROUNDS]]` writes bench/results/overload.json, of which `make docs` draws
docs/overload.svg. The gate of `make soak` (tests/soak/test_goodput.py) measures with the same functions.
Loads are multiples of what the server answers in a closed loop of the same run. Each round has all of them,
so that other work on the machine meets all alike, and time that such work took from the engine does not
count.
"""

import asyncio
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.server import tiny_model
from tests.server.launch import Server
from tests.soak import open_loop, timer

RESULTS = Path(__file__).parent / "results" / "overload.json"
MULTIPLES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
#: Rows for 16 answers, and a cache for five or six of their usual size.
FLAGS = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "80", "--block-size", "16")
LAYERS = 8  # so that the engine is the bottleneck, not HTTP
FIRST_TOKEN_SECONDS = 1.0
#: A token may take so many times as long as in a closed loop of few clients.
PACE = 4.0
_RAMP_SECONDS = 3.0  # of each phase: the first answers have not ended yet
_FEW_CLIENTS = (3, 4, 5)


@dataclass
class Phase:
    """What was measured at one load, over all rounds."""

    multiple: float  # of the load that saturates the server
    seconds: float = 0.0  # without those in which the engine was ready to run and other work had the CPUs
    wall_seconds: float = 0.0
    offered: int = 0  # requests, without their retries
    good_tokens: int = 0  # of answers within the SLO
    tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    shed: list[float] = field(default_factory=list)  # seconds until a refusal was there
    preemptions: int = 0
    broken: dict[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Tokens per second within the SLO."""
        return self.good_tokens / self.seconds

    @property
    def shed_share(self) -> float:
        """Of all attempts."""
        attempts = len(self.shed) + len(self.first_token)
        return len(self.shed) / attempts if attempts else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not less than this share of them; 0 for none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def seconds_without_cpu(pid: int) -> float:
    """How long a process has been ready to run while others had the CPUs."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def start(directory: Path) -> Any:
    """The server that is overloaded."""
    return Server(tiny_model.write(directory / "tiny", layers=LAYERS), directory, *FLAGS)


@dataclass
class Bench:
    """One server under load. `saturation`: answers per second in a closed loop; `slo`: what is good."""

    server: Any
    saturation: float
    slo: open_loop.Slo
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of requests: no prompt comes twice

    def measure(self, phase: Phase, seconds: float) -> None:
        """Offer the load of a phase, and add what came of it."""
        before, engine = self.server.metric("llm_preemptions_total"), self.server.children()["engine"]
        waited, begun = seconds_without_cpu(engine), time.monotonic()
        rate = phase.multiple * self.saturation
        record = asyncio.run(open_loop.offer(self.server.port, rate, seconds, self.numbers))
        deprived = (seconds_without_cpu(engine) - waited) / (time.monotonic() - begun)
        since = min(record.arrived) + _RAMP_SECONDS
        late = [answer for answer in record.answers if answer.ended >= since]
        phase.seconds += (seconds - _RAMP_SECONDS) * (1 - deprived)
        phase.wall_seconds += seconds - _RAMP_SECONDS
        phase.offered += sum(arrived >= since for arrived in record.arrived)
        phase.tokens += sum(answer.tokens for answer in late)
        phase.good_tokens += sum(answer.tokens for answer in late if answer.is_good(self.slo))
        phase.first_token += [answer.first_token - answer.asked for answer in late]
        phase.shed += [took for at, took in record.sheds if at >= since]
        phase.preemptions += round(self.server.metric("llm_preemptions_total") - before)
        for what, count in record.broken.items():
            phase.broken[what] = phase.broken.get(what, 0) + count
        self.rest()

    def rest(self) -> None:
        """Wait until nothing runs: what was given up is aborted."""
        self.server.wait("it is idle", lambda: self.server.metric("llm_active_requests") == 0, 10)
        self.server.wait("its engine is idle", lambda: self.server.statusz()["running"] == 0, 10)


def calibrate(server: Any, seconds: float) -> Bench:
    """Find the load that saturates the server, and the pace of an answer when it is not overloaded."""
    numbers = itertools.count(10**6)
    asyncio.run(open_loop.ask_in_turn(server.port, _FEW_CLIENTS[0], 2.0, numbers))  # warm up
    best, pace = 0.0, 0.0
    for clients in _FEW_CLIENTS:
        record = asyncio.run(open_loop.ask_in_turn(server.port, clients, seconds, numbers))
        assert record.answers and not record.broken, record.broken
        best = max(best, len(record.answers) / seconds)
        pace = quantile([(one.ended - one.first_token) / one.tokens for one in record.answers], 0.5)
    bench = Bench(server, best, open_loop.Slo(FIRST_TOKEN_SECONDS, PACE * pace))
    bench.rest()
    return bench


def curve(bench: Bench, multiples: Sequence[float], seconds: float, rounds: int) -> list[Phase]:
    """Every load in each round, alternately in rising and in falling order."""
    phases = [Phase(multiple) for multiple in multiples]
    for number in range(rounds):
        for phase in phases if number % 2 == 0 else phases[::-1]:
            bench.measure(phase, seconds)
    return phases


class MachineTimer:
    """How late the machine's own timers are meanwhile, in a process of its own: `lateness`, in seconds."""

    def __enter__(self) -> "MachineTimer":
        command = [sys.executable, timer.__file__]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lateness: list[float] = []
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        said, _ = self._process.communicate()
        self.lateness = [float(line) for line in said.splitlines()[:-1]]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    directory = Path(tempfile.mkdtemp())
    with start(directory) as server, MachineTimer() as machine:
        server.wait_ready()
        bench = calibrate(server, 10.0)
        phases = curve(bench, MULTIPLES, seconds, rounds)
    results = {
        "command": f"python -m bench.overload {seconds:g} {rounds}",
        "machine": f"{os.cpu_count()} CPUs ({platform.machine()}), shared by server and clients",
        "timers_late_p99_ms": 1000 * quantile(machine.lateness, 0.99),
        "saturation_requests_per_second": bench.saturation,
        "slo": asdict(bench.slo),
        "phases": [summary(phase, bench) for phase in phases],
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


def summary(phase: Phase, bench: Bench) -> dict[str, float]:
    """One point of the curve."""
    return {
        "multiple": phase.multiple,
        "offered_requests_per_second": round(phase.multiple * bench.saturation, 2),
        "goodput": round(phase.goodput, 1),
        "throughput": round(phase.tokens / phase.seconds, 1),
        "ttft_p50_ms": round(1000 * quantile(phase.first_token, 0.5), 1),
        "ttft_p99_ms": round(1000 * quantile(phase.first_token, 0.99), 1),
        "shed_share": round(phase.shed_share, 4),
        "shed_p99_ms": round(1000 * quantile(phase.shed, 0.99), 1),
        "answers": len(phase.first_token),
        "preemptions": phase.preemptions,
        "engine_without_cpu_share": round(1 - phase.seconds / phase.wall_seconds, 3),
    }


if __name__ == "__main__":
    main()
