"""The cost of copying a KV block to the host and back, compared with recomputing it, with SmolLM2-135M (a
section of ``bench.cpu``).

The engine's thread copies before it computes, so a copy delays every running request. Measured in one run:
copies alone, a decode step for comparison, and a preempted request that resumes, swapped and recomputed, each
as the time until its next token.
"""

import functools
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from quire_server.core.config import PreemptionMode
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Copies, Step
from quire_server.runner.kv_offload import OffloadWorker
from quire_server.runner.model_runner import ModelRunner, RunnerConfig

BLOCK, STREAMS, COPIED, REPEATS = 16, 8, 64, 5
LENGTHS = (16, 64, 256, 1024)


def milliseconds(what: Callable[[], object]) -> float:
    """Median of several runs, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        what()
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times[1:])


def copying(tiers: OffloadWorker | None, count: int, block_bytes: int) -> str:
    """Of so many blocks in one step."""
    assert tiers is not None, "the runner was given a host tier"
    pairs = tuple((n, n) for n in random.Random(0).sample(range(COPIED), count))
    steps = {
        "save": Step(1, (), (), (), (), (), (), copies=Copies((), pairs, (), ())),
        "load": Step(1, (), (), (), (), (), (), copies=Copies((), (), pairs, ())),
    }

    def run(step: Step) -> None:
        tiers.copy(step).finish()

    each = {name: milliseconds(functools.partial(run, step)) / count for name, step in steps.items()}
    return "\n".join(
        f"| {name} {count} at once, each | {ms:.3f} ms ({block_bytes / ms / 1e6:.1f} GB/s) |"
        for name, ms in each.items()
    )


class Engine:
    """The real scheduler and runner."""

    def __init__(self, runner: ModelRunner, mode: PreemptionMode) -> None:
        slots = runner.num_host_slots if mode is PreemptionMode.SWAP else 0
        self._runner = runner
        self.scheduler = Scheduler(
            SchedulerConfig(
                STREAMS, 512, runner.max_model_len, runner.num_blocks, BLOCK,
                enable_prefix_caching=False, num_host_slots=slots, preemption_mode=mode,
            ),
            eos_token_ids=(),
        )  # fmt: skip

    def add(self, name: str, length: int) -> None:
        rng = random.Random(name)
        prompt = tuple(rng.randrange(1000, 40000) for _ in range(length))
        self.scheduler.add(Request(name, prompt, SamplingParams(4096 - length, temperature=0.0), 0.0))

    def step(self) -> list[str]:
        """Whose tokens came."""
        step = self.scheduler.schedule()
        assert step is not None
        return [event.request_id for event in self.scheduler.commit(step, self._runner.run(step))]

    def until(self, name: str) -> float:
        """Milliseconds until a request has its next token."""
        begin = time.perf_counter()
        while name not in self.step():
            pass
        return (time.perf_counter() - begin) * 1e3


def decode(runner: ModelRunner) -> float:
    """Milliseconds of a step of STREAMS answers."""
    engine = Engine(runner, PreemptionMode.RECOMPUTE)
    for number in range(STREAMS):
        engine.add(str(number), 128)
    engine.until(str(STREAMS - 1))
    return milliseconds(engine.step)


def going_on(runner: ModelRunner, mode: PreemptionMode, length: int) -> float:
    """Milliseconds from the preemption of a request of that length, alone, until its next token."""
    engine, times = Engine(runner, mode), []
    engine.add("only", length)
    for _ in range(REPEATS + 1):
        engine.until("only")
        (sequence,) = engine.scheduler._queue.running.sequences
        engine.scheduler._queue.preempt(sequence)
        times.append(engine.until("only"))
    return median(times[1:])


def report(directory: Path) -> str:
    """As Markdown."""
    options = RunnerConfig(
        max_model_len=2048, max_num_batched_tokens=512, num_blocks_override=256, kv_offload_host_bytes=1 << 28
    )
    runner = ModelRunner.load(directory, options, lambda loaded, total: None)
    block_bytes = runner.kv_cache_bytes // runner.num_blocks
    step = decode(runner)
    modes = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
    rows = [(length, *(going_on(runner, mode, length) for mode in modes)) for length in LENGTHS]
    return (
        "| | |\n|---|---:|\n"
        + "\n".join(copying(runner._offload, count, block_bytes) for count in (1, 8, COPIED))
        + f"\n| a decode step of {STREAMS} answers | {step:.1f} ms |\n\n"
        "Preempted and gone on, the copy to the host included:\n\n"
        "| tokens | swapped | recomputed |\n|---:|---:|---:|\n"
        + "\n".join(f"| {length} | {swap:.1f} ms | {again:.1f} ms |" for length, swap, again in rows)
        + f"\n\n{runner.dtype}, linear layers {runner.quantization}, blocks of {BLOCK} tokens and "
        f"{block_bytes / 1024:.0f} KiB; medians of {REPEATS}."
    )
