"""The effect of a long prompt on running requests (a section of ``bench.cpu``).

Eight streams decode; 10,000 prompt tokens arrive and are computed in chunks of 512, or as one chunk. The gaps
between the streams' tokens are compared with the time of a chunk on an otherwise idle engine. SmolLM2 has
8,192 positions, so the 10,000 tokens are ten prompts of 1,000.
"""

from itertools import islice
from pathlib import Path

from bench.compare import table
from bench.engine import Quire, prompts, request

CHUNK, PIECE, STREAMS = 512, 1000, 8


def interference(directory: Path, pieces: int = 10) -> str:
    """Quantiles of the gaps: idle, in chunks, and as one chunk."""
    engine = Quire(directory, quantization="int8")
    idle = _gaps(engine, pieces, streams=0, chunk=CHUNK)
    busy = _gaps(engine, pieces, streams=STREAMS, chunk=CHUNK)
    whole = _gaps(engine, pieces, streams=STREAMS, chunk=pieces * PIECE + 64)
    idle_p50, rows = _quantile(idle, 0.5), []
    for name, gaps in (("idle engine, chunks of 512", idle), ("chunks of 512", busy), ("one chunk", whole)):
        p50, p99 = _quantile(gaps, 0.5), _quantile(gaps, 0.99)
        rows.append([name, f"{p50 * 1e3:.0f} ms", f"{p99 * 1e3:.0f} ms", f"{p99 / idle_p50:.2f}x"])
    return table(["between two tokens", "p50", "p99", "p99 / idle chunk"], rows)


def _gaps(engine: Quire, pieces: int, *, streams: int, chunk: int) -> list[float]:
    """Seconds of each step that computes a part of the long prompt."""
    scheduler = engine.scheduler(chunk=chunk)
    for number, prompt in enumerate(prompts(1, streams, 32, engine.vocab_size)):
        scheduler.add(request(number, prompt, 150))
    for _ in islice(engine.steps(scheduler), 4):
        pass
    for number, prompt in enumerate(prompts(2, pieces, PIECE, engine.vocab_size), start=streams):
        scheduler.add(request(number, prompt, 1))
    return [seconds for step, seconds in engine.steps(scheduler) if step.total_tokens > streams]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
