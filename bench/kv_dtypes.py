"""Decode speed with a KV cache of each dtype (a section of ``bench.cpu``).

Sixteen streams of 1,024 tokens, of which half end first, then all but one. The three engines take their steps
alternately, so that a disturbance of the machine affects all of them.
"""

import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.runner.model_runner import ModelRunner, RunnerConfig

DTYPES = ("auto", "fp8", "int8")
CONTEXT, STEPS = 1024, 48
STREAMS = (16, 8, 1)  # running requests in each phase


class Streams:
    """One engine with all of the requests; ``seconds``: of each decode step, by the number of its streams."""

    def __init__(self, directory: Path, kv_cache_dtype: str) -> None:
        options = RunnerConfig(
            dtype="auto",
            quantization="int8",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=2 * CONTEXT,
            max_num_batched_tokens=CONTEXT,
            max_num_seqs=STREAMS[0],
            kv_cache_memory_bytes=2 << 30,
        )
        self._runner = ModelRunner.load(directory, options, lambda loaded, total: None)
        config = SchedulerConfig(STREAMS[0], CONTEXT, 2 * CONTEXT, self._runner.num_blocks, 16, False)
        self._scheduler = Scheduler(config, eos_token_ids=())
        rng = random.Random(3)
        for number in range(STREAMS[0]):
            prompt = tuple(rng.randrange(1000, 40000) for _ in range(CONTEXT))
            phases = sum(number < count for count in STREAMS)
            sampling = SamplingParams(STEPS * phases, temperature=0.0)
            self._scheduler.add(Request(str(number), prompt, sampling, 0.0))
        self.seconds: dict[int, list[float]] = defaultdict(list)

    def step(self) -> bool:
        """Run one step; False if there is none left."""
        start = time.perf_counter()
        step = self._scheduler.schedule()
        if step is None:
            return False
        self._scheduler.commit(step, self._runner.run(step))
        if step.total_tokens == len(step.rows):
            self.seconds[len(step.rows)].append(time.perf_counter() - start)
        return True


def speeds(directory: Path) -> str:
    """Tokens per second of all streams, from the median step."""
    engines = {dtype: Streams(directory, dtype) for dtype in DTYPES}
    stepped = [True]
    while any(stepped):
        stepped = [engine.step() for engine in engines.values()]
    counts = sorted(STREAMS)
    lines = ["| KV cache |" + "".join(f" x{count} |" for count in counts), "|---|" + "---:|" * len(counts)]
    rates = {
        dtype: [count / statistics.median(engine.seconds[count]) for count in counts]
        for dtype, engine in engines.items()
    }
    for dtype, own in rates.items():
        cells = [f"{a:.0f} ({a / b:.2f}x)" for a, b in zip(own, rates["auto"], strict=True)]
        lines.append(f"| {dtype} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + (
        f"\n\nint8 weights, bfloat16 otherwise (so is the cache of `auto`); contexts of {CONTEXT} to "
        f"{CONTEXT + len(STREAMS) * STEPS} tokens; tok/s of all streams, from the median of about {STEPS} "
        "steps in turns."
    )
