"""The gateway's memory over many requests: python -m bench.gateway_memory [--requests N]

Every prompt is another one, so that what the gateway keeps of prompts, clients and connections reaches its
bounds. The slope is that of a line through the second half of the figures. Writes
bench/results/gateway_memory.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime

from bench.gateway import CLIENTS, PATH, RESULTS, Target, child, gateway_before, resident
from bench.process_cpu import used
from e2e.ports import free_ports

PARTS = 40
WORDS = 200
PAGE = """# The gateway's memory over many requests

`python -m bench.gateway_memory --requests {requests}`, {day}. Whole answers over {clients} connections, each
prompt another one of 1 KB, with a route by prefix, a client's key and limits, and signed requests.

| requests | MB (RSS) |
|---:|---:|
{rows}

A line through the second half rises by {slope:+.1f} MB over a million requests (bar: 0). {cpu:.0f} us of CPU
a request.
"""


def prompts(first: int, number: int) -> Iterator[str]:
    """Bodies of requests; the words of each are its own."""
    for request in range(first, first + number):
        words = " ".join(f"{request * WORDS + word:x}"[-4:] for word in range(WORDS))
        yield json.dumps({"model": "tiny", "messages": [{"role": "user", "content": f"{request} {words}"}]})


def send(gateway: Target, first: int, number: int) -> None:
    """So many requests, each answered with 200."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{body}\n" for body in prompts(first, number))
        file.flush()
        argv = [sys.executable, "-m", "bench.minimal_client", str(gateway.port), str(CLIENTS), file.name]
        answers = json.loads(subprocess.check_output([*argv, "--path", PATH, "--key", gateway.key]))
    if len(answers) != number:
        raise RuntimeError(f"{number} requests had {len(answers)} answers")


def slope(figures: list[tuple[int, float]]) -> float:
    """Of the least-squares line, MB over a million requests."""
    counts, megabytes = zip(*figures, strict=True)
    return 1e6 * statistics.linear_regression(counts, megabytes).slope


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10**6)
    requests = parser.parse_args().requests
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "bench.gateway", "--replica", str(port)]
    figures = []
    with child(argv, port), gateway_before(port) as gateway:
        assert gateway.pid is not None
        for part in range(PARTS):
            send(gateway, part * requests // PARTS, requests // PARTS)
            figures.append(((part + 1) * requests // PARTS, resident(gateway) / 1024))
            print(f"{figures[-1][0]:,} requests: {figures[-1][1]:.1f} MB", flush=True)
        cpu = 1e6 * used(gateway.pid) / requests
    text = PAGE.format(
        requests=requests,
        day=datetime.now(UTC).date(),
        clients=CLIENTS,
        rows="\n".join(f"| {count:,} | {megabytes:.1f} |" for count, megabytes in figures[3::4]),
        slope=slope(figures[PARTS // 2 :]),
        cpu=cpu,
    )
    RESULTS.with_name("gateway_memory.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
