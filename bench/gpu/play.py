"""Requests through the scheduler and a runner, in this process, and the time of everything."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import Step, StepResult
from quire_server.engine.engine_core import StepPipeline
from quire_server.runner.model_runner import ModelRunner

_GREEDY = SamplingParams(1, temperature=0.0, ignore_eos=True)


class Timed:
    """A runner that notes how long its host takes to launch a step. ``ahead``: whether the next step may be
    launched before the result is there.
    """

    def __init__(self, runner: ModelRunner, *, ahead: bool) -> None:
        self._runner, self._ahead = runner, ahead
        self.seconds: list[float] = []

    @property
    def max_steps_in_flight(self) -> int:
        """As the runner, or one."""
        return self._runner.max_steps_in_flight if self._ahead else 1

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """The runner's."""
        began = time.perf_counter()
        wait = self._runner.launch(step)
        self.seconds.append(time.perf_counter() - began)
        return wait


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds: of all, to each first token, of steps in which everybody decoded, of those steps' launches."""

    seconds: float
    first: list[float]
    steps: list[float]
    launches: list[float]

    @property
    def step(self) -> float:
        """The median."""
        return median(self.steps)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Seconds: of all, from each request's arrival to its first token, between two tokens of a request."""

    seconds: float
    first: list[float]
    gaps: list[float]


def prompts(seed: int, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens: no two share a prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def play(
    runner: ModelRunner,
    asked: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    chunk: int,
    block: int,
    ahead: bool = True,
    rounds: int = 1,
    sampling: SamplingParams = _GREEDY,
) -> Played:
    """All prompts come at once. With ``rounds``, they come again once all are answered, and find their
    prefixes; the times are the last round's.
    """
    config = SchedulerConfig(
        len(asked), chunk, runner.max_model_len, runner.num_blocks, block, enable_prefix_caching=rounds > 1
    )
    scheduler = Scheduler(config, eos_token_ids=())
    sampling = replace(sampling, max_tokens=new_tokens)
    played = None
    for number in range(rounds):
        for index, prompt in enumerate(asked):
            scheduler.add(Request(f"{number}/{index}", tuple(prompt), sampling, 0.0))
        played = _round(scheduler, Timed(runner, ahead=ahead), len(asked))
    assert played is not None, "there is a round"
    return played


def _round(scheduler: Scheduler, runner: Timed, count: int) -> Played:
    pipeline, first, steps, launches = StepPipeline(scheduler, runner), dict[str, float](), [], []
    began = before = time.perf_counter()
    number = 0
    while scheduler.has_work:
        advanced = pipeline.advance()
        now = time.perf_counter()
        if advanced is None:
            raise RuntimeError("there is work that cannot be scheduled")
        step, events = advanced
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"a request failed: {event.error}")
            first.setdefault(event.request_id, now - began)
        if len(step.rows) == count and step.total_tokens == count:
            steps.append(now - before)
            launches.append(runner.seconds[number])
        before, number = now, number + 1
    return Played(before - began, list(first.values()), steps, launches)


def arrive(
    runner: ModelRunner,
    asked: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    rate: float,
    chunk: int,
    block: int,
) -> Arrived:
    """So many prompts come a second, whatever is answered by then, and are answered greedily."""
    config = SchedulerConfig(len(asked), chunk, runner.max_model_len, runner.num_blocks, block)
    scheduler = Scheduler(config, eos_token_ids=())
    pipeline, sampling = StepPipeline(scheduler, runner), replace(_GREEDY, max_tokens=new_tokens)
    first, gaps, last = list[float](), list[float](), dict[str, float]()
    began, added = time.perf_counter(), 0
    while added < len(asked) or scheduler.has_work:
        while added < len(asked) and time.perf_counter() - began >= added / rate:
            scheduler.add(Request(str(added), tuple(asked[added]), sampling, 0.0))
            added += 1
        if not scheduler.has_work:
            time.sleep(max(0.0, began + added / rate - time.perf_counter()))
            continue
        advanced = pipeline.advance()
        now = time.perf_counter()
        if advanced is None:
            raise RuntimeError("there is work that cannot be scheduled")
        for event in advanced[1]:
            if event.error is not None:
                raise RuntimeError(f"a request failed: {event.error}")
            if (before := last.get(event.request_id)) is None:
                first.append(now - began - int(event.request_id) / rate)
            else:
                gaps.append(now - before)
            last[event.request_id] = now
    return Arrived(time.perf_counter() - began, first, gaps)
