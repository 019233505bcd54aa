"""What the gateway's relay costs, beside a bare relay and LiteLLM's proxy in one run: python -m bench.gateway

The replica is a program that answers at once with bytes it has ready, and the client does no more than look
for the end of an answer, so that almost all that differs is the relay. Its CPU is counted by the kernel: on a
machine that is shared it varies less than time does. LiteLLM is measured where .cache/litellm has it
(`make bench-gateway` installs it). Writes bench/results/gateway.md.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import cast

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from bench import process_cpu
from e2e.ports import free_ports
from tests.gateway.kube_stub import KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "gateway.md"
LITELLM = ROOT / ".cache" / "litellm" / "bin"
CLIENTS, STREAMS, CHUNKS, CHUNK_SECONDS = 16, 100, 100, 0.005
OPEN_STREAMS, SLOW_SECONDS = 2000, 0.1
RATE, RATE_SECONDS = 200, 10
#: LiteLLM gets so much less to do, because it takes as much longer.
LITELLM_PART = 10
KEY = "sk-bench"
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "word " * 200}]  # 1 KB
COMMON = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
USAGE = {"prompt_tokens": 200, "completion_tokens": 60, "total_tokens": 260}
WHOLE = json.dumps(
    {
        **COMMON,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "x" * 240}, "finish_reason": "stop"}
        ],
        "usage": USAGE,
    }
).encode()
DELTA = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
EVENT = {**COMMON, "object": "chat.completion.chunk", "choices": [DELTA]}
CHUNK = b"data: " + json.dumps(EVENT, separators=(",", ":")).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
ANSWER = HEAD % (b"application/json", b"content-length: %d" % len(WHOLE)) + WHOLE
STREAM = HEAD % (b"text/event-stream", b"transfer-encoding: chunked")

BARS = {
    "requests a CPU second": ">= 2,500",
    "chunks a CPU second": ">= 30,000",
    "added p50, ms": "<= 1.0",
    "added p99, ms": "<= 3.0",
    "MB at most, 2,000 streams open": "<= 150",
}
REPORT = f"""# What the gateway's relay costs

`{{command}}`, {{day}}, {{seconds:.0f}} s; {{machine}}; load before and after {{loads}}.

Medians of {{rounds}} rounds in turns, over {CLIENTS} connections (streams: {STREAMS}, a chunk of {len(CHUNK)}
bytes each {1000 * CHUNK_SECONDS:.0f} ms); prompts of 1 KB. CPU is that of the relay's process alone. The
gateway has all switched on that a platform would: an LLMRoute with the choice of a replica by prefix, the
client's key and limits, signed requests, metrics, the access log. The bare relay is uvicorn and aiohttp
with nothing between (`bench/bare_relay.py`): what Python costs at least. LiteLLM's proxy runs one worker
without a database, keys and limits.

| load | to | requests | a second | first bytes p50, ms | CPU us each | us a chunk | of the bare relay's |
|---|---|---|---|---|---|---|---|
{{loads_table}}

At {RATE} requests a second over {CLIENTS * 4} connections for {RATE_SECONDS} s, a whole answer each, in turns
with the direct run:

| to | p50, ms | p99, ms | added p50 | added p99 |
|---|---|---|---|---|
{{rate_table}}

Memory of the gateway: {{memory}}.

The bars were set on a machine where the bare relay makes 6,000 requests and 40,000 chunks a CPU second. What
it makes here says how much of a bar is this machine's.

| bar | | gateway | bare relay |
|---|---|---|---|
{{bars_table}}

What a million requests add to its memory is in [gateway_memory.md](gateway_memory.md), what the policies do
that choose a replica in [gateway_routing.md](gateway_routing.md).
"""


class Replica(asyncio.Protocol):
    """One connection to the replica: an answer for each body that is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A gateway or a client connects."""
        self._transport, self._received = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            self._received = b""
            fields = json.loads(body)
            if fields.get("stream"):
                self._transport.write(STREAM)
                self._chunk(CHUNKS, SLOW_SECONDS if fields.get("user") == "slow" else CHUNK_SECONDS)
            else:
                self._transport.write(ANSWER)

    def _chunk(self, left: int, seconds: float) -> None:
        data = CHUNK if left else DONE
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if left:
            asyncio.get_running_loop().call_later(seconds, self._chunk, left - 1, seconds)
        else:
            self._transport.write(b"0\r\n\r\n")


async def serve(port: int) -> None:
    """The replica's process."""
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


@dataclass(frozen=True)
class Target:
    """What the client sends its requests to. ``pid``: whose CPU is counted, None: that of none."""

    name: str
    port: int
    pid: int | None = None
    key: str = ""
    part: int = 1  # of the requests of others it gets one in so many


@dataclass(frozen=True)
class Run:
    """One load: seconds in all, of each request until its first and last bytes, and of the relay's CPU."""

    requests: int
    seconds: float
    first_bytes: list[float]
    latencies: list[float]
    cpu: float

    @property
    def cpu_each(self) -> float:
        """Of a request, in microseconds."""
        return 1e6 * self.cpu / self.requests


@dataclass(frozen=True)
class Load:
    """Requests over so many connections, at once or at a rate."""

    name: str
    requests: int
    clients: int
    stream: bool = False
    rate: float | None = None
    user: str = ""

    @property
    def part(self) -> str:
        """What an answer is made of."""
        return "chunks" if self.stream else "requests"

    def run(self, target: Target) -> Run:
        """Send them."""
        number = max(1, self.requests // target.part)
        body = {"model": "tiny", "messages": MESSAGES, "stream": self.stream, "user": self.user}
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write(f"{json.dumps(body)}\n" * number)
            file.flush()
            argv = [sys.executable, "-m", "bench.minimal_client", str(target.port), str(self.clients)]
            argv += [file.name, "--path", PATH, *(["--rate", str(self.rate)] if self.rate else [])]
            argv += ["--key", target.key] if target.key else []
            before = process_cpu.used(target.pid) if target.pid else 0.0
            answers = json.loads(subprocess.check_output(argv))
            cpu = process_cpu.used(target.pid) - before if target.pid else 0.0
        begun = min(one["start"] for one in answers)
        ended = max(one["arrivals"][-1] for one in answers)
        first = [one["arrivals"][0] - one["start"] for one in answers]
        last = [one["arrivals"][-1] - one["start"] for one in answers]
        return Run(number, ended - begun, first, last, cpu)


@dataclass
class Bars:
    """What is to be reached, and what was, of each relay."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, bar: str, target: Target, figure: str) -> None:
        """One figure."""
        self.found.setdefault(bar, {})[target.name] = figure

    def table(self) -> str:
        """Its rows."""
        rows = [
            (bar, wanted, self.found[bar]["gateway"], self.found[bar].get("bare relay", ""))
            for bar, wanted in BARS.items()
        ]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def listens(port: int) -> bool:
    """Whether a program does."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def child(argv: Sequence[str], port: int, **environ: str) -> Iterator[int]:
    """A program that listens on a port; its process."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env={**os.environ, **environ}, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while not listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{argv} does not listen:\n{log.read().decode()[-2000:]}")
                time.sleep(0.1)  # between two looks at another process
            yield process.pid
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def gateway_before(port: int) -> Iterator[Target]:
    """The gateway, with a route, a client with limits, and a key to sign with."""
    with tempfile.TemporaryDirectory() as folder, KubeStub() as kube:
        key = Path(folder) / "tls.key"
        private = Ed25519PrivateKey.generate()
        key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        kube.put(endpoint_slice("tiny-1", {"one": "127.0.0.1"}, port=port))
        kube.put(llm_object("LLMRoute", "chat", {"models": ["tiny"], "rules": [RULE]}))
        limits = {"requestsPerMinute": 10**7, "tokensPerMinute": 10**9, "concurrentRequests": 10**5}
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        kube.put(llm_object("LLMClient", "bench", {"keyHashes": [digest], "limits": limits}))
        with Gateway(kube.url, Path(folder), SIGNING_KEY_FILE=key) as gateway:
            gateway.wait_replicas(1, seconds=120)
            yield Target("gateway", gateway.port, gateway.process.pid, KEY)


RULE = {"targets": [{"deployment": "tiny"}]}


@contextlib.contextmanager
def targets() -> Iterator[list[Target]]:
    """The replica itself, and every relay before it."""
    port, bare, peer = free_ports(3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(child([sys.executable, "-m", "bench.gateway", "--replica", str(port)], port))
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "bench.bare_relay", str(bare), url]
        found = [Target("direct", port), Target("bare relay", bare, stack.enter_context(child(argv, bare)))]
        found.append(stack.enter_context(gateway_before(port)))
        if LITELLM.exists():
            found.append(stack.enter_context(litellm_before(url, peer)))
        yield found


@contextlib.contextmanager
def litellm_before(url: str, port: int) -> Iterator[Target]:
    """LiteLLM's proxy with one worker, as it starts by default, but for what it would fetch."""
    model = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "tiny", "litellm_params": model}]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        argv = [str(LITELLM / "litellm"), "--config", file.name, "--host", "127.0.0.1", "--port", str(port)]
        environ = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
        }
        with child(argv, port, **environ) as pid:
            lines = subprocess.check_output([LITELLM / "python", "-c", _VERSION], text=True)
            yield Target(f"LiteLLM {lines.strip()}", port, pid, part=LITELLM_PART)


_VERSION = "from importlib.metadata import version; print(version('litellm'))"


def closed_loop(found: list[Target], requests: int, rounds: int, bars: Bars) -> str:
    """The first table."""
    rows = []
    for load in (
        Load("unary", requests, CLIENTS),
        Load(f"streams of {CHUNKS} chunks", STREAMS, STREAMS, stream=True),
    ):
        runs: dict[str, list[Run]] = {one.name: [] for one in found}
        for _ in range(rounds):
            for target in found:
                runs[target.name].append(load.run(target))
        bare = statistics.median(run.cpu_each for run in runs["bare relay"])
        for target in found:
            each = runs[target.name]
            rate = statistics.median(run.requests / run.seconds for run in each)
            first = statistics.median(second for run in each for second in run.first_bytes)
            cpu = statistics.median(run.cpu_each for run in each)
            cells = [load.name, target.name, each[0].requests, f"{rate:,.0f}", f"{1000 * first:.2f}"]
            cells += [f"{cpu:.0f}", f"{cpu / CHUNKS:.1f}" if load.stream else "", f"{cpu / bare:.1f}x"]
            if target.pid is None:
                cells[-3:] = ["", "", ""]
            else:
                parts = CHUNKS if load.stream else 1
                bars.put(f"{load.part} a CPU second", target, f"{parts * 1e6 / cpu:,.0f}")
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def open_loop(found: list[Target], rounds: int, bars: Bars) -> str:
    """The second table."""
    load = Load("rate", RATE * RATE_SECONDS, CLIENTS * 4, rate=RATE)
    direct = found[0]
    rows = []
    for target in found[1:]:
        own, added = [], []
        for _ in range(rounds):
            before, run = load.run(direct), load.run(target)
            own.append(_percentiles(run))
            added.append(tuple(a - b for a, b in zip(_percentiles(run), _percentiles(before), strict=True)))
        medians = [map(statistics.median, zip(*each, strict=True)) for each in (own, added)]
        figures = [f"{one:.2f}" for each in medians for one in each]
        rows.append(f"| {target.name} | {' | '.join(figures)} |")
        bars.put("added p50, ms", target, figures[2])
        bars.put("added p99, ms", target, figures[3])
    return "\n".join(rows)


def _percentiles(run: Run) -> tuple[float, float]:
    """p50 and p99 of the latencies, in milliseconds."""
    hundredths = statistics.quantiles(run.latencies, n=100)
    return 1000 * hundredths[49], 1000 * hundredths[98]


def memory(gateway: Target, requests: int, bars: Bars) -> str:
    """Its growth over many requests, and with streams open."""
    load = Load("memory", requests, CLIENTS)
    load.run(gateway)
    before = resident(gateway) // 1024
    load.run(gateway)
    after = resident(gateway) // 1024
    slow = Load("open", OPEN_STREAMS, OPEN_STREAMS, stream=True, user="slow")
    slow.run(gateway)
    most = resident(gateway, "VmHWM") // 1024
    bars.put("MB at most, 2,000 streams open", gateway, str(most))
    return (
        f"{before} MB after {2 * requests:,} requests, {after - before:+d} MB over {requests:,} more, "
        f"at most {most} MB with {OPEN_STREAMS:,} streams open"
    )


def resident(target: Target, field: str = "VmRSS") -> int:
    """Memory of its process, in KiB."""
    status = Path(f"/proc/{target.pid}/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0])


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        uvloop.run(serve(arguments.replica))
        return
    before, begun = os.getloadavg()[0], time.monotonic()
    bars = Bars()
    with targets() as found:
        for target in found:  # warm up
            Load("warm", 200, CLIENTS).run(target)
        tables = {
            "loads_table": closed_loop(found, arguments.requests, arguments.rounds, bars),
            "rate_table": open_loop(found, arguments.rounds, bars),
            "memory": memory(found[2], arguments.requests, bars),
            "bars_table": bars.table(),
        }
    names = ("aiohttp", "uvicorn", "uvloop")
    packages = ", ".join([f"Python {platform.python_version()}", *(f"{one} {version(one)}" for one in names)])
    text = REPORT.format(
        command=f"python -m bench.gateway --requests {arguments.requests} --rounds {arguments.rounds}",
        rounds=arguments.rounds,
        day=datetime.now(UTC).date(),
        seconds=time.monotonic() - begun,
        machine=f"{os.cpu_count()} CPUs ({platform.machine()}), {packages}",
        loads=f"{before:.1f} and {os.getloadavg()[0]:.1f}",
        **tables,
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
