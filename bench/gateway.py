"""What the gateway's relay costs, beside a direct connection in one run: python -m bench.gateway

The replica is a program that answers at once with bytes it has ready, and the client does no more than look
for the end of an answer, so that almost all that differs is the relay. Its CPU is counted by the kernel: on a
machine that is shared it varies less than time does. Writes bench/results/gateway.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import cast

import uvloop

from bench import process_cpu
from e2e.ports import free_ports
from tests.gateway.kube_stub import KubeStub, endpoint_slice
from tests.gateway.launch import Gateway

RESULTS = Path(__file__).parent / "results" / "gateway.md"
ROUNDS, CLIENTS, STREAMS, CHUNKS, CHUNK_SECONDS = 3, 16, 100, 100, 0.005
PROMPT = "word " * 200  # 1 KB
WHOLE = json.dumps({"choices": [{"message": {"content": "x" * 300}}]}).encode()
CHUNK = b"data: " + json.dumps({"choices": [{"delta": {"content": "x" * 110}}]}).encode() + b"\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
ANSWER = HEAD % (b"application/json", b"content-length: %d" % len(WHOLE)) + WHOLE
STREAM = HEAD % (b"text/event-stream", b"transfer-encoding: chunked")

REPORT = f"""# What the gateway's relay costs

`{{command}}`, {{day}}, {{seconds:.0f}} s; {{machine}}; load before and after {{loads}}.

Medians of {ROUNDS} rounds in turns, over {CLIENTS} connections (streams: {STREAMS}, a chunk of {len(CHUNK)}
bytes each {1000 * CHUNK_SECONDS:.0f} ms); prompts of 1 KB. CPU is that of the relay's process alone: parsing,
the choice of a replica by prefix, metrics and the access log are in it; no keys and limits are set.

| load | to | requests | a second | first bytes p50, ms | CPU us each | us a chunk | of them a CPU second |
|---|---|---|---|---|---|---|---|
{{table}}

What the policies do that choose a replica is in [gateway_routing.md](gateway_routing.md).
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
            if b'"stream": true' in body:
                self._transport.write(STREAM)
                self._chunk(CHUNKS)
            else:
                self._transport.write(ANSWER)

    def _chunk(self, left: int) -> None:
        if not left:
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
        asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._chunk, left - 1)


async def serve(port: int) -> None:
    """The replica's process."""
    server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", port)
    await server.serve_forever()


@dataclass(frozen=True)
class Run:
    """One load: seconds in all, of each request until its first bytes, and of the relay's CPU."""

    seconds: float
    first_bytes: list[float]
    cpu: float


def load(port: int, relay: int | None, requests: int, clients: int, *, stream: bool) -> Run:
    """Send requests over so many connections."""
    body = {"model": "tiny", "prompt": PROMPT, "stream": stream}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(f"{json.dumps(body)}\n" * requests)
        file.flush()
        argv = [sys.executable, "-m", "bench.minimal_client"]
        before = process_cpu.used(relay) if relay else 0.0
        output = subprocess.check_output([*argv, str(port), str(clients), file.name])
        cpu = process_cpu.used(relay) - before if relay else 0.0
    answers = json.loads(output)
    begun = min(one["start"] for one in answers)
    ended = max(one["arrivals"][-1] for one in answers)
    return Run(ended - begun, [one["arrivals"][0] - one["start"] for one in answers], cpu)


def listens(port: int) -> bool:
    """Whether the replica does."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def world() -> Iterator[tuple[int, Gateway]]:
    """The replica's port, and a gateway before it."""
    (port,) = free_ports(1)
    replica = subprocess.Popen([sys.executable, "-m", "bench.gateway", "--replica", str(port)])
    try:
        with tempfile.TemporaryDirectory() as directory, KubeStub() as kube:
            kube.put(endpoint_slice("tiny-1", {"one": "127.0.0.1"}, port=port))
            with Gateway(kube.url, Path(directory)) as gateway:
                gateway.wait("the replica listens", lambda: listens(port), 120)
                yield port, gateway.wait_replicas(1, seconds=120)
    finally:
        replica.kill()
        replica.wait()


def measure(requests: int) -> str:
    """The table."""
    rows, first = [], {}
    with world() as (port, gateway):
        relay = gateway.process.pid
        load(gateway.port, relay, 200, CLIENTS, stream=False)  # warms both up
        for name, number, clients, stream in (
            ("unary", requests, CLIENTS, False),
            (f"streams of {CHUNKS} chunks", STREAMS, STREAMS, True),
        ):
            runs: dict[str, list[Run]] = {"direct": [], "gateway": []}
            for _ in range(ROUNDS):
                runs["direct"].append(load(port, None, number, clients, stream=stream))
                runs["gateway"].append(load(gateway.port, relay, number, clients, stream=stream))
            for target, each in runs.items():
                rate = statistics.median(number / run.seconds for run in each)
                first[target] = statistics.median(second for run in each for second in run.first_bytes)
                cpu = statistics.median(run.cpu / number for run in each)
                relayed = "" if target == "direct" else f"{1e6 * cpu:.0f}"
                chunk = f"{1e6 * cpu / CHUNKS:.1f}" if relayed and stream else ""
                core = f"{(CHUNKS if stream else 1) / cpu:,.0f}" if relayed else ""
                rows.append(
                    f"| {name} | {target} | {number} | {rate:,.0f} | {1000 * first[target]:.2f} "
                    f"| {relayed} | {chunk} | {core} |"
                )
        memory = Path(f"/proc/{relay}/status").read_text().partition("VmHWM:")[2].split()[0]
    return "\n".join([*rows, "", f"Memory of the gateway at its highest: {int(memory) // 1024} MB."])


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        uvloop.run(serve(arguments.replica))
        return
    before, begun = os.getloadavg()[0], time.monotonic()
    table = measure(arguments.requests)
    names = ("aiohttp", "uvicorn", "uvloop")
    packages = ", ".join([f"Python {platform.python_version()}", *(f"{one} {version(one)}" for one in names)])
    text = REPORT.format(
        command=f"python -m bench.gateway --requests {arguments.requests}",
        day=datetime.now(UTC).date(),
        seconds=time.monotonic() - begun,
        machine=f"{os.cpu_count()} CPUs ({platform.machine()}), {packages}",
        loads=f"{before:.1f} and {os.getloadavg()[0]:.1f}",
        table=table,
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
