"""The cost of a step without the model (a section of ``bench.cpu``).

Schedules and commits steps of 256 running requests with constant tokens: medians in microseconds, for each
policy.
"""

import gc
import statistics
import time
from collections.abc import Iterator

from quire_server.core.policy import Policy
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult

RUNNING, WAITING, BLOCK = 256, 256, 16
STEPS = 1000
LIMIT = 100.0


def steady(policy: Policy) -> Scheduler:
    """A scheduler whose rows all decode, with a waiting queue. Every step fills blocks of 16 rows."""
    longest = 200 + 2 * STEPS
    config = SchedulerConfig(RUNNING, 8192, longest, RUNNING * (longest // BLOCK + 1), BLOCK, policy=policy)
    scheduler = Scheduler(config, eos_token_ids=[0])
    for i in range(RUNNING + WAITING):
        prompt = tuple(range(1, 100 + i % BLOCK))
        scheduler.add(Request(f"{i:032x}-0", prompt, SamplingParams(2 * STEPS), arrival=float(i)))
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, StepResult(step.step_id, (1,) * sum(step.samples)))
        if step.total_tokens == len(step.rows) == RUNNING:
            break
    return scheduler


def measure(scheduler: Scheduler) -> Iterator[tuple[float, float]]:
    """Microseconds of schedule and of commit, for each step."""
    for _ in range(STEPS):
        begin = time.perf_counter()
        step = scheduler.schedule()
        decided = time.perf_counter()
        assert step is not None and len(step.rows) == RUNNING
        result = StepResult(step.step_id, (1,) * RUNNING)
        computed = time.perf_counter()
        scheduler.commit(step, result)
        yield (decided - begin) * 1e6, (time.perf_counter() - computed) * 1e6


def table() -> str:
    """As Markdown."""
    lines = [
        f"| policy | schedule, µs | commit, µs | both, µs | 90 % | {LIMIT:.0f} µs |",
        "|---|---|---|---|---|---|",
    ]
    for policy in Policy:
        scheduler = steady(policy)
        gc.collect()
        gc.freeze()  # as the engine does before it serves
        schedule, commit = zip(*measure(scheduler), strict=True)
        gc.unfreeze()
        both = sorted(map(sum, zip(schedule, commit, strict=True)))
        median, tail = statistics.median(both), both[len(both) * 9 // 10]
        parts = f"{statistics.median(schedule):.0f} | {statistics.median(commit):.0f}"
        met = "met" if median <= LIMIT else "missed"
        lines.append(f"| {policy} | {parts} | {median:.0f} | {tail:.0f} | {met} |")
    return "\n".join(lines) + (
        f"\n\n{RUNNING} running, {WAITING} waiting, {STEPS} steps without a model; medians."
    )
