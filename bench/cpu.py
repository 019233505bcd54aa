"""CPU decode and prefill of SmolLM2-135M, beside transformers, in one run: python bench/cpu.py [--write]

Prints a table with ratios; --write stores it in bench/results/ with machine, versions and command. Never
imported.
"""

import argparse
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from e2e import models
from quire_server.core.request import Request, SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.runner.model_runner import ModelRunner, RunnerOptions

STREAMS = (1, 8, 16)
PROMPT, ANSWER, LONG = 64, 64, 1024
REPEATS = 3


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count * length)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


class Quire:
    def __init__(self, directory: Path, dtype: str) -> None:
        options = RunnerOptions(dtype=dtype, max_model_len=2048, max_num_batched_tokens=LONG)
        self.runner = ModelRunner.load(directory, options, lambda loaded, total: None)

    def decode(self, count: int) -> float:
        """Tokens a second once all streams decode."""
        scheduler = self._scheduler()
        self._add(scheduler, prompts(count, PROMPT), ANSWER)
        tokens, start = 0, 0.0
        while (step := scheduler.schedule()) is not None:
            is_steady = len(step.rows) == count == step.total_tokens
            if is_steady and not start:
                start = time.perf_counter()
            events = scheduler.commit(step, self.runner.run(step))
            tokens += len(events) if is_steady else 0
        return tokens / (time.perf_counter() - start)

    def prefill(self) -> float:
        scheduler = self._scheduler()
        self._add(scheduler, prompts(1, LONG), 1)
        start = time.perf_counter()
        while (step := scheduler.schedule()) is not None:
            scheduler.commit(step, self.runner.run(step))
        return LONG / (time.perf_counter() - start)

    def _scheduler(self) -> Scheduler:
        config = SchedulerConfig(16, LONG, self.runner.max_model_len, self.runner.num_blocks, 16, False)
        return Scheduler(config, eos_token_ids=())

    def _add(self, scheduler: Scheduler, batch: list[list[int]], length: int) -> None:
        for number, prompt in enumerate(batch):
            sampling = SamplingParams(length, temperature=0.0)
            scheduler.add(Request(str(number), tuple(prompt), sampling, 0.0))


class Transformers:
    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    @torch.inference_mode()
    def decode(self, count: int) -> float:
        ids = torch.tensor(prompts(count, PROMPT))
        cache = self.model(ids, use_cache=True)
        past, token = cache.past_key_values, cache.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(ANSWER - 1):
            output = self.model(token, past_key_values=past, use_cache=True)
            past, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        return (ANSWER - 1) * count / (time.perf_counter() - start)

    @torch.inference_mode()
    def prefill(self) -> float:
        ids = torch.tensor(prompts(1, LONG))
        start = time.perf_counter()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return LONG / (time.perf_counter() - start)


def best(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(REPEATS))


def table(directory: Path) -> str:
    engines = {
        "transformers float32": Transformers(directory, torch.float32),
        "transformers bfloat16": Transformers(directory, torch.bfloat16),
        "quire float32": Quire(directory, "float32"),
        "quire bfloat16": Quire(directory, "bfloat16"),
    }
    heads = [f"decode x{count}" for count in STREAMS] + [f"prefill {LONG}"]
    lines = ["| tok/s | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    base: list[float] = []
    for name, engine in engines.items():
        figures = [best(lambda n=count, e=engine: e.decode(n)) for count in STREAMS] + [best(engine.prefill)]
        base = base or figures
        cells = [f"{value:.0f} ({value / first:.1f}x)" for value, first in zip(figures, base, strict=True)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def machine() -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    return (
        f"{processor}, {torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}.\n"
        f"Best of {REPEATS}; prompts of {PROMPT} tokens, answers of {ANSWER}. "
        "Command: `PYTHONPATH=. python bench/cpu.py --write`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the table in bench/results/cpu.md")
    arguments = parser.parse_args()
    report = f"# SmolLM2-135M on a CPU\n\n{machine()}\n\n{table(models.smollm2())}\n"
    print(report)
    if arguments.write:
        path = Path(__file__).parent / "results" / "cpu.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(report)


if __name__ == "__main__":
    main()
