"""What a transfer of KV blocks adds to the time to the first token: `python -m bench.prefill_decode`.

A producer and a consumer for each transport, whole servers on the loopback interface, with SmolLM2-135M.
Each prompt is computed once, by the producer, whose cache has it from then on; a consumer forgets its own
before each measurement and has to fetch all of it. In each round the same prompt is sent to the producer and
to every consumer in turn, so that what else the machine does hits all of them. The difference is what the
transfer costs, without the noise of a second of prefill. The bar is bytes / (1 GB/s) + 10 ms.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx

from e2e import models
from e2e.ports import free_ports
from tests.server.launch import NO_TLS, Server

BLOCK, NAME, KEY = 16, "tiny", "of-the-bench"
BYTES_PER_SECOND, SETUP_SECONDS = 1e9, 0.010
FEWEST, MOST_SECONDS = 5, 8.0  # rounds of one length, on a machine that does other things
TRANSPORTS = ("tcp", "shared_memory", "nixl")


class Client:
    """Requests to one server, over one connection."""

    def __init__(self, server: Server) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self._client = httpx.Client(base_url=server.url, headers=headers, timeout=60, verify=NO_TLS)

    def first_token(self, prompt: list[int]) -> float:
        """Seconds until the first token of a streamed answer."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        began_at, seconds = time.perf_counter(), 0.0
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    seconds = seconds or time.perf_counter() - began_at
        assert seconds, "no token came"
        return seconds

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._client.post("/reset_prefix_cache").raise_for_status()


def block_bytes(model: Path) -> int:
    """Bytes of one block in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(size) * BLOCK * 4


def measure(producer: Client, consumers: list[Client], length: int, rounds: int) -> list[list[float]]:
    """Seconds that the transfer to each consumer added, in each round; fewer where they take too long."""
    rng = random.Random(length)
    prompt, added = [rng.randrange(3, 250) for _ in range(length)], list[list[float]]()
    producer.first_token(prompt)  # now it is cached there
    began_at = time.perf_counter()
    while len(added) < rounds and (len(added) < FEWEST or time.perf_counter() - began_at < MOST_SECONDS):
        cached = producer.first_token(prompt)
        added.append([])
        for consumer in consumers:
            consumer.forget()
            added[-1].append(consumer.first_token(prompt) - cached)
    return [list(column) for column in zip(*added, strict=True)]


def compare(model: Path, lengths: tuple[int, ...], rounds: int) -> str:
    """A table: transport, tokens -> MB, what was added, the bar."""
    each = block_bytes(model)
    memory = ("--kv-cache-memory-bytes", str(each * (sum(lengths) // BLOCK + 20)))
    common = (*memory, "--dtype", "float32", "--quantization", "none", "--max-num-seqs", "4")
    (port,) = free_ports(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (keys := folder / "keys").mkdir()
        (keys / "bench").write_text(f"{KEY}\nadmin: true\n")

        def start(name: str, *flags: str) -> Server:
            (place := folder / name).mkdir()
            return stack.enter_context(Server(model, place, *common, "--api-keys-dir", str(keys), *flags))

        port_of = ("--kv-transfer-port", str(port), "--kv-transport", "nixl")  # offers the others as well
        producer = start("producer", "--kv-role", "kv_producer", *port_of)
        asks = ("--kv-role", "kv_consumer", "--kv-producers", f"127.0.0.1:{port}")
        below = ("--local-prefill-below-tokens", "32")
        consumers = [start(name, *asks, *below, "--kv-transport", name) for name in TRANSPORTS]
        for server in (producer, *consumers):
            server.wait_ready(120)
        clients = [Client(server) for server in consumers]
        for client in clients:
            client.first_token([5] * 64)  # connects, and loads what is loaded lazily
        found = {length: measure(Client(producer), clients, length, rounds) for length in lengths}
        for server in consumers:
            failed, done = (server.metric(f"llm_kv_transfer{name}_total") for name in ("_failures", "s"))
            asked = 1 + sum(len(columns[0]) for columns in found.values())
            assert (failed, done) == (0, asked), "a prompt was not fetched"
    return "\n".join(_rows(found, each))


def _rows(found: dict[int, list[list[float]]], each: int) -> Iterator[str]:
    """Of the table: tokens after tokens, transport after transport."""
    yield "| tokens | MB | transport | rounds | added, median ms | fastest quarter ms | bar ms |"
    yield "|---:|---:|---|---:|---:|---:|---:|"
    for length, columns in found.items():
        size = (length - 1) // BLOCK * each
        bar = size / BYTES_PER_SECOND + SETUP_SECONDS
        for transport, added in zip(TRANSPORTS, columns, strict=True):
            figures = (statistics.median(added), statistics.quantiles(added, n=4)[0], bar)
            cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in figures)
            yield f"| {length} | {size / 1e6:.1f} | {transport} | {len(added)} | {cells} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print(compare(arguments.model or models.smollm2(), (256, 512, 1024, 1536), arguments.rounds))


if __name__ == "__main__":
    main()
