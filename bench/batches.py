"""What a batch of 1,000 lines costs interactive clients: python -m bench.batches

A real model server that goes by priorities, the gateway and quire-batch. One interactive client asks at a
fixed pace, in turns without and with a batch that runs. Writes bench/results/batches.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import openai

from e2e import models
from e2e.ports import free_ports
from tests.batch.launch import CHAT, Batch, line, submit, write_keys
from tests.gateway.kube_stub import NAMESPACE, KubeStub, endpoint_slice
from tests.gateway.launch import Gateway
from tests.server.launch import Server

RESULTS = Path(__file__).parent / "results" / "batches.md"
LINES, LINE_TOKENS, ASKED, PAUSE_SECONDS, TOKENS = 1000, 8, 200, 0.4, 8
MAX_SEQS = 8

REPORT = """# Interactive clients beside a batch

`{command}`, {day}; {machine}; load before {load:.1f}.

SmolLM2-135M on one CPU with `--scheduling-policy priority` and {seqs} requests at once, at most {step}
tokens a step; an interactive request each {pause} s at least, with a prompt of its own, through the
gateway, streamed; {asked} without and {asked} with a batch of {lines} lines of {tokens} tokens. Bar: the
p95 of the time to the first token is at most 1.2 times what it is without.

| | first token p50, ms | p95, ms | lines done meanwhile | errors |
|---|---:|---:|---:|---:|
| alone | {alone[0]:.0f} | {alone[1]:.0f} |  | {alone[2]} |
| beside the batch | {beside[0]:.0f} | {beside[1]:.0f} | {done} | {beside[2]} |
| ratio | {p50:.2f} | **{p95:.2f}** | | |

The batch ended {end} with {completed} of {lines} lines, {rate:.1f} a second.
"""


@contextlib.contextmanager
def stack(directory: Path, step_tokens: int) -> Iterator[str]:
    """The gateway's URL."""
    keys = write_keys(directory / "keys")
    trust = ("--gateway-keys-dir", str(keys / "public"), "--gateway-audience", f"{NAMESPACE}/tiny")
    sizes = ("--kv-cache-memory-bytes", str(256 << 20), "--max-num-batched-tokens", str(step_tokens))
    flags = (*trust, *sizes, "--scheduling-policy", "priority", "--max-num-seqs", str(MAX_SEQS))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    environ = {"SIGNING_KEY_FILE": keys / "tls.key", "PUBLIC_KEYS_DIR": keys / "public", "BATCH_URL": url}
    name = ("--served-model-name", "tiny")
    with Server(models.smollm2(), directory, *flags, *name) as engine, KubeStub() as kube:
        engine.wait_ready()
        ports = {"port": engine.port, "health_port": engine.health_port}
        kube.put(endpoint_slice("tiny-one", {"one": "127.0.0.1"}, **ports))
        with Gateway(kube.url, directory, **environ) as gateway:
            gateway.wait_replicas(1)
            with Batch(gateway.url, keys, directory / "state", PORT=port) as batch:
                batch.url = url
                batch.wait_ready()
                yield gateway.url


async def ask(url: str, label: str) -> tuple[list[float], int]:
    """Seconds to the first token of each answer, and how many failed."""
    seconds, errors = [], 0
    async with aiohttp.ClientSession() as session:
        for number in range(ASKED):
            content = f"{label} {number}: tell me about the sea, the sky and the mountains of your country."
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
            begun = time.perf_counter()
            async with session.post(url + CHAT, json={**body, "stream": True}) as answer:
                first = None
                async for row in answer.content:
                    if first is None and b'"content"' in row:
                        first = time.perf_counter() - begun
            if answer.status == 200 and first is not None:
                seconds.append(first)
            else:
                errors += 1
            await asyncio.sleep(max(0.0, PAUSE_SECONDS - (time.perf_counter() - begun)))
    return seconds, errors


def measured(url: str, label: str) -> tuple[float, float, int]:
    """p50 and p95 in milliseconds, and errors."""
    seconds, errors = asyncio.run(ask(url, label))
    twentieths = statistics.quantiles(seconds, n=20)
    return 1000 * statistics.median(seconds), 1000 * twentieths[18], errors


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--step-tokens", type=int, default=512, help="--max-num-batched-tokens of the server")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory, stack(Path(directory), arguments.step_tokens) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        measured(url, "warm")
        alone = measured(url, "alone")
        lines = [line(number, max_tokens=LINE_TOKENS, ignore_eos=True) for number in range(arguments.lines)]
        batch, begun = submit(client, *lines).id, time.monotonic()

        def done() -> int:
            counts = client.batches.retrieve(batch).request_counts
            return 0 if counts is None else counts.completed

        while not done():
            time.sleep(0.1)  # between two looks at another process
        before = done()
        beside = measured(url, "beside")
        meanwhile = done() - before
        while (status := client.batches.retrieve(batch).status) in ("in_progress", "finalizing"):
            time.sleep(0.5)  # between two looks at another process
        completed, seconds = done(), time.monotonic() - begun
    text = REPORT.format(
        command=f"python -m bench.batches --lines {arguments.lines} --step-tokens {arguments.step_tokens}",
        day=datetime.now(UTC).date(),
        machine=f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}",
        load=load,
        seqs=MAX_SEQS,
        step=arguments.step_tokens,
        pause=PAUSE_SECONDS,
        asked=ASKED,
        lines=arguments.lines,
        tokens=LINE_TOKENS,
        alone=alone,
        beside=beside,
        done=meanwhile,
        p50=beside[0] / alone[0],
        p95=beside[1] / alone[1],
        end=json.dumps(status),
        completed=completed,
        rate=completed / seconds,
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
