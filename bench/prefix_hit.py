"""Time to the first token with and without a cached prefix. Imported by ``cpu.py``."""

import random
import statistics
import time
from pathlib import Path

import peers

from quire_server.core.request import Request, SamplingParams

PREFIX, TAIL, REPEATS = 1024, 16, 3


def prefix_hit(directory: Path) -> str:
    engine = peers.Quire(directory, dtype="auto", quantization="int8")
    rng, cold, warm = random.Random(7), [], []
    for number in range(REPEATS):
        scheduler = engine.scheduler(prefix_caching=True)
        prefix = [rng.randrange(1000, 40000) for _ in range(PREFIX)]
        for times in (cold, warm):
            prompt = (*prefix, *(rng.randrange(1000, 40000) for _ in range(TAIL)))
            start = time.perf_counter()
            name = f"{number}-{len(times)}-{times is warm}"
            scheduler.add(Request(name, prompt, SamplingParams(1, temperature=0.0), 0.0))
            while (step := scheduler.schedule()) is not None:
                scheduler.commit(step, engine.runner.run(step))
            times.append(time.perf_counter() - start)
    without, with_hit = statistics.median(cold) * 1e3, statistics.median(warm) * 1e3
    return (
        "| prompt of 1,024 + 16 tokens | first token after |\n|---|---:|\n"
        f"| nothing cached | {without:.1f} ms |\n| the 1,024 cached | {with_hit:.1f} ms "
        f"({100 * with_hit / without:.1f} %) |"
    )
