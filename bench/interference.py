"""What a long prompt does to those who are being answered. Imported by ``cpu.py``.

Eight streams decode; 10,000 prompt tokens arrive and are computed in chunks of 512, or as one. The gaps
between the streams' tokens are compared with the time of a chunk on an engine that has nothing else to do.
SmolLM2 knows 8,192 positions: the 10,000 tokens are ten prompts of 1,000.
"""

import random
import time
from pathlib import Path

import peers

from quire_server.core.request import Request, SamplingParams

CHUNK, PIECES, PIECE, STREAMS = 512, 10, 1000, 8


def interference(directory: Path) -> str:
    engine = peers.Quire(directory, dtype="auto", quantization="int8")
    idle = _gaps(engine, streams=0, chunk=CHUNK)
    busy = _gaps(engine, streams=STREAMS, chunk=CHUNK)
    whole = _gaps(engine, streams=STREAMS, chunk=PIECES * PIECE + 64)
    idle_p50, rows = _quantile(idle, 0.5), []
    for name, gaps in (("idle engine, chunks of 512", idle), ("chunks of 512", busy), ("one chunk", whole)):
        p50, p99 = _quantile(gaps, 0.5), _quantile(gaps, 0.99)
        rows.append(f"| {name} | {p50 * 1e3:.0f} ms | {p99 * 1e3:.0f} ms | {p99 / idle_p50:.2f}x |")
    return "\n".join(["| between two tokens | p50 | p99 | p99 / idle chunk |", "|---|---:|---:|---:|", *rows])


def _gaps(engine: peers.Quire, *, streams: int, chunk: int) -> list[float]:
    """Seconds of each step that computes a part of the long prompt."""
    rng = random.Random(streams + chunk)
    scheduler = engine.scheduler(chunk=chunk)
    for number in range(streams):
        prompt = tuple(rng.randrange(1000, 40000) for _ in range(32))
        scheduler.add(Request(f"stream {number}", prompt, SamplingParams(150, temperature=0.0), 0.0))
    for _ in range(4):
        if (step := scheduler.schedule()) is not None:
            scheduler.commit(step, engine.runner.run(step))
    for number in range(PIECES):
        prompt = tuple(rng.randrange(1000, 40000) for _ in range(PIECE))
        scheduler.add(Request(f"long {number}", prompt, SamplingParams(1, temperature=0.0), 0.0))
    gaps = []
    while (step := scheduler.schedule()) is not None:
        start = time.perf_counter()
        scheduler.commit(step, engine.runner.run(step))
        if step.total_tokens > streams:
            gaps.append(time.perf_counter() - start)
    return gaps


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
