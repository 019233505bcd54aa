"""What a transfer of KV blocks adds to the time to the first token: `python -m bench.prefill_decode`.

A producer and a consumer, two whole servers on the loopback interface, with SmolLM2-135M. The prefix of each
prompt is cached at the producer, so that its own first token needs no prefill; the consumer has to fetch all
of it. The difference of the two is what the transfer costs, without the noise of a second of prefill. The bar
is bytes / (1 GB/s) + 10 ms.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from e2e import models
from e2e.ports import free_ports
from tests.server.launch import NO_TLS, Server

BLOCK, NAME = 16, "tiny"
BYTES_PER_SECOND, SETUP_SECONDS = 1e9, 0.010
TRANSPORTS = ("tcp", "shared_memory")


def first_token(server: Server, prompt: list[int]) -> float:
    """Seconds until the first token of a streamed answer."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    began_at = time.perf_counter()
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body, timeout=60, verify=NO_TLS
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                return time.perf_counter() - began_at
    raise AssertionError("no token came")


def block_bytes(model: Path) -> int:
    """Bytes of one block in float32."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(size) * BLOCK * 4


def measure(producer: Server, consumer: Server, length: int, rounds: int, seed: int) -> list[float]:
    """Seconds that the transfer added, for each round with a prompt of its own."""
    rng, added = random.Random(f"{seed} {length}"), list[float]()
    for _ in range(rounds):
        prompt = [rng.randrange(3, 250) for _ in range(length)]
        first_token(producer, prompt)  # now it is cached there
        cached = first_token(producer, prompt)
        added.append(first_token(consumer, prompt) - cached)
    return added


def compare(model: Path, lengths: tuple[int, ...], rounds: int) -> str:
    """A table: transport, tokens -> MB, what was added, the bar."""
    rows = ["| transport | tokens | MB | added, median ms | best ms | bar ms |", "|---|---|---|---|---|---|"]
    for transport in TRANSPORTS:
        rows += _rows(model, transport, lengths, rounds)
    return "\n".join(rows)


def _rows(model: Path, transport: str, lengths: tuple[int, ...], rounds: int) -> Iterator[str]:
    """Those of one transport, measured with servers of its own."""
    each = block_bytes(model)
    memory = ("--kv-cache-memory-bytes", str(each * (max(lengths) // BLOCK + 1) * (2 * rounds + 4)))
    common = (*memory, "--dtype", "float32", "--quantization", "none", "--max-num-seqs", "4")
    (port,) = free_ports(1)
    producing = ("--kv-role", "kv_producer", "--kv-transfer-port", str(port))
    reading = ("--kv-transport", transport, "--local-prefill-below-tokens", "32")
    consuming = ("--kv-role", "kv_consumer", "--kv-producers", f"127.0.0.1:{port}", *reading)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("producer", "consumer")]
        for place in places:
            place.mkdir()
        with (
            Server(model, places[0], *common, *producing) as producer,
            Server(model, places[1], *common, *consuming) as consumer,
        ):
            producer.wait_ready(120)
            consumer.wait_ready(120)
            first_token(consumer, [5] * 64)  # connects, and loads what is loaded lazily
            for length in lengths:
                added = measure(producer, consumer, length, rounds, seed=1)
                size = (length - 1) // BLOCK * each
                bar = size / BYTES_PER_SECOND + SETUP_SECONDS
                figures = (statistics.median(added), min(added), bar)
                cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in figures)
                yield f"| {transport} | {length} | {size / 1e6:.1f} | {cells} |"
            failed = consumer.metric("llm_kv_transfer_failures_total")
            assert failed == 0, f"{failed:.0f} transfers failed"
            done = consumer.metric("llm_kv_transfers_total")
            assert done == 1 + rounds * len(lengths), f"{done:.0f} transfers"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    print(compare(arguments.model or models.smollm2(), (256, 512, 1024, 1536), arguments.rounds))


if __name__ == "__main__":
    main()
