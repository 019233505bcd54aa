"""Time to the first token with and without a cached prefix. Imported by ``cpu.py``."""

import statistics
from pathlib import Path

from bench.compare import REPEATS, table
from bench.engine import Quire, prompts, request

PREFIX, TAIL = 1024, 16


def prefix_hit(directory: Path) -> str:
    """Medians of both."""
    engine = Quire(directory, quantization="int8")
    cold, warm = list[float](), list[float]()
    for repeat in range(REPEATS):
        scheduler = engine.scheduler(prefix_caching=True)
        (prefix,) = prompts(repeat, 1, PREFIX, engine.vocab_size)
        tails = prompts(-1 - repeat, 2, TAIL, engine.vocab_size)
        for number, (times, tail) in enumerate(zip((cold, warm), tails, strict=True)):
            scheduler.add(request(number, prefix + tail, 1))
            times.append(sum(seconds for _, seconds in engine.steps(scheduler)))
    without, with_hit = statistics.median(cold) * 1e3, statistics.median(warm) * 1e3
    rows = [
        ["nothing cached", f"{without:.1f} ms"],
        ["the 1,024 cached", f"{with_hit:.1f} ms ({100 * with_hit / without:.1f} %)"],
    ]
    return table(["prompt of 1,024 + 16 tokens", "first token after"], rows)
