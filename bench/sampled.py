"""What a sampled step costs beside a greedy one (used by ``bench.cpu``): one thread, in turns."""

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.compare import REPEATS, table
from bench.engine import Quire, prompts
from quire_kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams


class Way(NamedTuple):
    """How tokens are drawn."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def params(self) -> SamplingParams:
        """Of a request that is not ended by a stop token."""
        return SamplingParams(
            ANSWER, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, ignore_eos=True
        )


ROWS = (1, 8, 16, 32)
PROMPT, ANSWER = 64, 40
WAYS = {
    "greedy": Way(0.0),
    "temperature 1": Way(1.0),
    "0.7, top_p 0.95": Way(0.7, top_p=0.95),
    "0.7, top_k 20, top_p 0.95": Way(0.7, top_k=20, top_p=0.95),
}
LARGE_VOCABULARY = 151_936  # Qwen's


def report(directory: Path) -> str:
    """Milliseconds a step of the model, and of drawing alone from a large vocabulary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return f"{_steps(Quire(directory))}\n\n{_large()}"
    finally:
        torch.set_num_threads(threads)


def _steps(engine: Quire) -> str:
    rows = []
    for count in ROWS:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way, given in WAYS.items():
                found[way].append(_step(engine, count, given.params()))
        cost = {way: statistics.median(each) for way, each in found.items()}
        ratio = {way: statistics.median(map(_ratio, found[way], found["greedy"])) for way in WAYS}
        rows.append([str(count), *(f"{1e3 * cost[way]:.1f} ({ratio[way]:.2f}x)" for way in WAYS)])
    heads = ["requests", *(f"{way}, ms a step" for way in WAYS)]
    note = f"Medians of {REPEATS} runs in turns, one thread; beside them the multiple of the greedy step."
    return f"{table(heads, rows)}\n\n{note}"


def _ratio(cost: float, greedy: float) -> float:
    return cost / greedy


def _step(engine: Quire, count: int, sampling: SamplingParams) -> float:
    """Seconds: the median of the steps in which each request gets one token."""
    scheduler = engine.scheduler()
    for number, prompt in enumerate(prompts(7, count, PROMPT, engine.vocab_size)):
        scheduler.add(Request(str(number), tuple(prompt), sampling, 0.0))
    return statistics.median(
        seconds for step, seconds in engine.steps(scheduler) if step.total_tokens == count
    )


def _large() -> str:
    """Drawing alone, from logits that are spread as those of a trained model."""
    rows = []
    for way, given in WAYS.items():
        temperature, top_k, top_p = (torch.full((16,), value) for value in given)
        seeds = torch.arange(16)
        logits = 3 * torch.randn(16, LARGE_VOCABULARY, generator=torch.Generator().manual_seed(1))
        arguments = (logits, seeds, temperature, top_k, top_p, torch.zeros(16), seeds, seeds)
        cost = []
        for function in (sample_tokens, sample_tokens_reference):
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                function(*arguments)
                times.append(time.perf_counter() - start)
            cost.append(f"{1e3 * statistics.median(times):.1f}")
        rows.append([way, *cost])
    heads = ["16 rows of 151,936 logits", "ms", "by torch, ms"]
    return table(heads, rows)
