"""The cost of the prefix cache without hits, and its saving with hits, with SmolLM2-135M (a section of
``bench.cpu``).

The cost is the CPU time of scheduling (schedule and commit) with the cache on and off, as a share of the
whole time of the same steps: on a shared machine a difference of two wall times would measure other
processes.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.runner.model_runner import ModelRunner, RunnerConfig

STREAMS, PROMPT, ANSWER = 4, 256, 16
PREFIX, TAIL = 1024, 16
LONG = PREFIX + TAIL
REPEATS = 3


@dataclass
class Run:
    deciding: float = 0.0  # CPU seconds
    first_token: float = 0.0  # wall seconds until the first token came
    whole: float = 0.0  # wall seconds
    hits: int = 0


def prompts(runner: ModelRunner, rng: random.Random, count: int, length: int) -> list[tuple[int, ...]]:
    vocab_size = runner.model_config.vocab_size
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for _ in range(count)]


def scheduler(runner: ModelRunner, *, caching: bool, host: int = 0) -> Scheduler:
    config = SchedulerConfig(
        16, LONG, runner.max_model_len, runner.num_blocks, 16, caching, num_host_slots=host
    )
    return Scheduler(config, eos_token_ids=())


def run(runner: ModelRunner, decider: Scheduler, batch: list[tuple[int, ...]], answer: int) -> Run:
    result = Run()
    before = decider.kv.stats().prefix_hits
    start = time.perf_counter()
    for number, prompt in enumerate(batch):
        decider.add(Request(str(number), prompt, SamplingParams(answer, temperature=0.0), 0.0))
    while True:
        begin = time.thread_time()
        step = decider.schedule()
        result.deciding += time.thread_time() - begin
        if step is None:
            break
        outcome = runner.run(step)
        begin = time.thread_time()
        events = list(decider.commit(step, outcome))
        result.deciding += time.thread_time() - begin
        if events and not result.first_token:
            result.first_token = time.perf_counter() - start
    result.whole = time.perf_counter() - start
    result.hits = decider.kv.stats().prefix_hits - before
    return result


def cost(runner: ModelRunner) -> str:
    """Without hits: every prompt is new, and the pool is so small that blocks are evicted all the time."""
    rng = random.Random(1)
    deciders = {caching: scheduler(runner, caching=caching) for caching in (True, False)}
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for _ in range(REPEATS + 1):
        for caching, decider in deciders.items():
            runs[caching].append(run(runner, decider, prompts(runner, rng, STREAMS, PROMPT), ANSWER))
    on, off = (median(r.deciding for r in runs[caching][1:]) for caching in (True, False))
    assert not any(r.hits for r in runs[True])
    whole = median(r.whole for r in runs[False][1:])
    rates = [STREAMS * (PROMPT + ANSWER) / median(r.whole for r in runs[c][1:]) for c in (True, False)]
    return (
        f"| deciding, cache on / off | {on * 1e3:.2f} / {off * 1e3:.2f} ms CPU |\n"
        f"| cost of the cache at no hits | {(on - off) / whole:.3%} of {whole:.2f} s |\n"
        f"| tokens a second, on / off | {rates[0]:.0f} / {rates[1]:.0f} |"
    )


def saving(runner: ModelRunner) -> str:
    """Time to the first token of a long prompt: computed, cached on the device, cached on the host."""
    rng = random.Random(2)
    names = ("computed", "prefix on the device", "prefix on the host")
    times: dict[str, list[float]] = {name: [] for name in names}
    decider = scheduler(runner, caching=True, host=runner.num_host_slots)
    for _ in range(REPEATS):
        (prompt,) = prompts(runner, rng, 1, LONG)
        for name in names:
            if name == names[2]:  # other prompts evict it from the device
                run(runner, decider, prompts(runner, rng, runner.num_blocks * 16 // LONG, LONG - 1), 1)
            result = run(runner, decider, [prompt], 1)
            assert (result.hits > 0) == (name != names[0])
            times[name].append(result.first_token)
    middle = {name: median(values) for name, values in times.items()}
    return "\n".join(
        f"| first token of {PREFIX:,} + {TAIL} tokens, {name} | {value * 1e3:.1f} ms "
        f"({value / middle[names[0]]:.1%}) |"
        for name, value in middle.items()
    )


def report(directory: Path) -> str:
    """As Markdown."""
    options = RunnerConfig(
        max_model_len=LONG + 128,
        max_num_batched_tokens=LONG,
        num_blocks_override=LONG // 16 + 16,
        kv_offload_host_bytes=1 << 30,
    )
    runner = ModelRunner.load(directory, options, lambda loaded, total: None)
    return (
        f"| | |\n|---|---:|\n{cost(runner)}\n{saving(runner)}\n\n"
        f"{runner.dtype}, linear layers {runner.quantization}, {STREAMS} requests of "
        f"{PROMPT} + {ANSWER} tokens; medians of {REPEATS}."
    )
