"""The gain of continuous batching, and its limits (a section of ``bench.cpu``).

The classic trace (of every eight requests seven want 50 tokens and one 500) with static and with continuous
batching, requests together and one after the other, and batches from 1 to 128 with the parts of a step.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.batch_sizes import batch_sizes
from bench.compare import REPEATS, table
from bench.engine import Quire, prompts, request
from quire_server.core.config import Batching
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult

BATCH, SHORT, LONG, PROMPT = 8, 50, 500, 16
TEN = 10
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
EIGHT = [*[SHORT] * (BATCH - 1), LONG]


def batching(directory: Path, eights: int = 8, sizes: Sequence[int] = SIZES) -> str:
    """All parts, as Markdown."""
    engine = Quire(directory, max_streams=max(TEN, *sizes))
    return "\n\n".join(
        [
            "### The classic trace: of every eight requests seven want 50 tokens and one 500",
            classic(engine, eights),
            "### The same trace without a model: how many requests, and in which order",
            steps_alone(16 * eights),
            "### Ten equal requests",
            ten(engine),
            "### The batch from 1 to 128",
            batch_sizes(engine, sizes),
        ]
    )


# ---------------------------------------------------------------- the classic trace


@dataclass
class Trace:
    """The steps of one batching mode in several runs. Seconds are kept by (rows, tokens) of a step, so that a
    disturbance of the machine does not move a median.
    """

    runs: int = 0
    tokens: int = 0  # in one run, of the counted steps
    waiting: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    end: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def seconds(self, steps: Mapping[tuple[int, int], list[float]]) -> float:
        """Of one run, if each of its steps took the median of its kind."""
        return sum(len(taken) * statistics.median(taken) for taken in steps.values()) / self.runs

    @property
    def rate(self) -> float:
        """Tokens per second while requests wait."""
        return self.tokens / self.seconds(self.waiting)

    @property
    def tokens_a_step(self) -> float:
        """While requests wait."""
        return self.tokens * self.runs / sum(map(len, self.waiting.values()))

    def milliseconds(self, rows: int) -> str:
        """Of a step that decodes this many requests and nothing else."""
        seconds = self.waiting.get((rows, rows))
        return f"{statistics.median(seconds) * 1e3:.1f}" if seconds else ""


def classic(engine: Quire, eights: int) -> str:
    """The three modes alternately. All static batches are alike, so two of them represent any number."""
    answers = EIGHT * eights
    few = EIGHT * min(2, eights)
    ways = {
        "static, the batch computed to its end": (few, Batching.STATIC, True),
        "`--batching static`: finished requests cost nothing": (few, Batching.STATIC, False),
        "continuous": (answers, Batching.CONTINUOUS, False),
    }
    traces = {name: Trace() for name in ways}
    for _ in range(REPEATS):
        for name, (wanted, mode, is_padded) in ways.items():
            _traced(engine, traces[name], wanted, mode, is_padded=is_padded)
    continuous = traces["continuous"]
    rows = [
        [
            name,
            f"{trace.tokens_a_step:.2f}",
            trace.milliseconds(BATCH),
            trace.milliseconds(1),
            f"{trace.rate:.0f}",
            f"{continuous.rate / trace.rate:.2f}x",
        ]
        for name, trace in traces.items()
    ]
    whole = sum(answers) / (continuous.seconds(continuous.waiting) + continuous.seconds(continuous.end))
    return (
        table(["batch of 8", "tokens a step", "ms at 8 rows", "ms at 1 row", "tok/s", "continuous is"], rows)
        + f"\n\nWhile requests wait; prompts of {PROMPT} tokens; {REPEATS} runs, each step counted as the "
        f"median of its kind. All {len(answers)} requests to the last, once none waits and rows "
        f"stay empty: continuous makes {whole:.0f} tok/s."
    )


def _traced(engine: Quire, trace: Trace, answers: list[int], mode: Batching, *, is_padded: bool) -> None:
    """``is_padded``: all requests compute as many tokens as the longest of their batch, as in generate()."""
    scheduler = engine.scheduler(streams=BATCH, batching=mode)
    texts = prompts(1, len(answers), PROMPT, engine.vocab_size)
    for number, (prompt, wanted) in enumerate(zip(texts, answers, strict=True)):
        scheduler.add(request(number, prompt, LONG if is_padded else wanted))
    made = 0
    has_waiting = True
    for step, seconds in engine.steps(scheduler):
        counts = has_waiting or mode is Batching.STATIC
        (trace.waiting if counts else trace.end)[len(step.rows), step.total_tokens].append(seconds)
        made += sum(step.samples) if counts else 0
        has_waiting = scheduler.num_waiting > 0
    trace.runs += 1
    trace.tokens = sum(answers) if is_padded else made


def steps_alone(most: int = 128) -> str:
    """Up to ``most`` groups of eight. Steps of the scheduler alone, static / continuous."""
    rng, rows, sizes = random.Random(0), [], [most // 16, most // 4, most]
    for title, arrange in (
        ("the long one last of each eight", lambda a: a),
        ("shuffled", lambda a: rng.sample(a, len(a))),
        ("by length", sorted),
    ):
        ratios = []
        for eights in sizes:
            answers = arrange(EIGHT * eights)
            static, continuous = (
                _count_steps(answers, mode) for mode in (Batching.STATIC, Batching.CONTINUOUS)
            )
            ratios.append(f"{static / continuous:.2f}x")
        rows.append([title, *ratios])
    limit = BATCH * LONG / sum(EIGHT)
    heads = ["steps, static / continuous", *(f"{BATCH * eights:,} requests" for eights in sizes)]
    return table(heads, rows) + (
        f"\n\nThe limit is {limit:.2f}x: a static batch takes {LONG} steps for its {sum(EIGHT)} tokens, and "
        f"continuous batching with all rows full {sum(EIGHT) / BATCH:.0f}. What is missing is the end, where "
        "long requests go on alone. Shuffled, a third of the static batches have no long request; by length, "
        "static batches waste nothing."
    )


def _count_steps(answers: Iterable[int], mode: Batching) -> int:
    config = SchedulerConfig(BATCH, 4096, PROMPT + LONG, BATCH * (PROMPT + LONG), 16, False, batching=mode)
    scheduler, steps = Scheduler(config, eos_token_ids=()), 0
    for number, wanted in enumerate(answers):
        scheduler.add(request(number, [1] * PROMPT, wanted))
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, StepResult(step.step_id, (1,) * sum(step.samples)))
        steps += 1
    return steps


# ---------------------------------------------------------------- ten requests


def ten(engine: Quire) -> str:
    """Ten equal requests, together and one after the other, alternately."""
    texts = prompts(2, TEN, 128, engine.vocab_size)
    together, alone = list[float](), list[float]()
    for _ in range(REPEATS):
        for times, streams in ((together, TEN), (alone, 1)):
            scheduler = engine.scheduler(streams=streams)
            for number, prompt in enumerate(texts):
                scheduler.add(request(number, prompt, 64))
            times.append(sum(seconds for _, seconds in engine.steps(scheduler)))
    one, other = statistics.median(alone), statistics.median(together)
    rows = [
        ["one after the other", f"{one:.2f} s", f"{640 / one:.0f}", ""],
        ["together", f"{other:.2f} s", f"{640 / other:.0f}", f"{one / other:.1f}x"],
    ]
    return table(["10 requests of 128 + 64 tokens", "all done after", "tok/s", "faster"], rows)
