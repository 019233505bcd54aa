"""Speculative decoding on a CPU: bench/speculation.py [--only SECTION ...]

Tokens per step compared with the expectation, and tokens per second compared with the same engine without
drafts, on a repetitive text and an open one; and what sampling with shared noise costs compared with
rejection sampling. Each section writes a table to bench/results/speculation/; bench/results/speculation.md
has all of them. Run by ``make bench``.
"""

import argparse
import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench import quality
from e2e import models
from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.draft_length import DraftCost, expected_tokens
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.stats import SpeculationStats
from quire_server.evaluate import draft_alignment
from quire_server.evaluate.text_windows import logits as logits_of
from quire_server.runner.loader import Checkpoint, open_as_draft
from quire_server.runner.model_runner import ModelRunner, RunnerConfig

RESULTS = Path(__file__).parent / "results"
DIRECTORY = models.smollm2()
LENGTH, LONGEST = 96, 8
ROWS, REQUESTS = 8, 40
PAIRS = 15  # of alternating runs: single runs differ by a tenth
FREE = DraftCost(once=0.0, each=0.0)
CODE = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def move(self, dx, dy):
        self.x += dx
        self.y += dy

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5
"""
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = {
    "repetitive": CHAT.format(f"Repeat this code, with z beside x and y:\n{CODE}") + CODE[:40],
    "open": CHAT.format("Tell me a story of a lighthouse keeper who finds a strange shell."),
}


def load(*, dtype: str, quantization: str, draft: Path | None = None) -> ModelRunner:
    options = RunnerConfig(
        dtype=dtype,
        quantization=quantization,
        max_model_len=1024,
        max_num_seqs=ROWS,
        kv_cache_memory_bytes=1 << 30,
        speculative_model=draft,
    )
    return ModelRunner.load(DIRECTORY, options, lambda loaded, total: None)


def run(
    runner: ModelRunner, text: str, method: SpeculativeMethod, count: int, *, fixed: bool, requests: int = 1
) -> tuple[float, SpeculationStats, list[list[int]]]:
    """(tokens per second after the first prompts and while no row is empty, statistics of drafts,
    answers).
    """
    speculation = None if method is SpeculativeMethod.NONE else SpeculationConfig(method, count)
    config = SchedulerConfig(
        ROWS, 512, runner.max_model_len, runner.num_blocks, 16, False, speculation=speculation
    )
    scheduler = Scheduler(config, eos_token_ids=())
    if fixed and scheduler._speculator is not None:
        # Drafts without cost are never disabled.
        scheduler._speculator._costs.cost = lambda num_rows: FREE  # type: ignore[method-assign]
    prompt = tuple(Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")).encode(text).ids)
    for index in range(requests):
        # Vary the lengths: answers of equal length would end together, and the next prompts would then share
        # a step without drafts, unlike independent requests.
        length = LENGTH if requests == 1 else LENGTH * 2 // 3 + index * 37 % (LENGTH * 2 // 3 + 1)
        greedy = SamplingParams(length, temperature=0.0, ignore_eos=True)
        scheduler.add(Request(str(index), prompt[index % ROWS :], greedy, 0.0))
    answers: list[list[int]] = [[] for _ in range(requests)]
    times: list[tuple[float, int]] = []  # (time, tokens), once the first ROWS requests all have a token
    left = requests
    while (step := scheduler.schedule()) is not None:
        for event in scheduler.commit(step, runner.run(step)):
            answers[int(event.request_id)] += event.token_ids
            left -= event.finish_reason is not None
        if all(answers[:ROWS]) and left >= min(ROWS, requests):
            times.append((time.perf_counter(), sum(map(len, answers))))
    (begin, before), (end, after) = times[0], times[-1]
    return (after - before) / (end - begin), scheduler.stats.speculation, answers


def acceptance(stats: SpeculationStats) -> float:
    """Of drafts that were verified, that is, all drafts before them were right."""
    tried = stats.drafts + sum(stats.accepted_per_position[:-1])
    return stats.accepted_tokens / tried if tried else 0.0


def sweep(runner: ModelRunner, method: SpeculativeMethod, repeats: int) -> str:
    """K from 1 to 8 with drafts in every step; then as served, with drafts only if they pay."""
    lines = [
        "| text | K | acceptance | tokens a drafted step | expected | tok/s | without | speed |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, text in TEXTS.items():
        run(runner, text, SpeculativeMethod.NONE, 0, fixed=False)  # warm
        for count, fixed in [*((k, True) for k in range(1, LONGEST + 1)), (4, False), (8, False)]:
            plain, drafted = [], []
            for _ in range(repeats):
                rate, _, truth = run(runner, text, SpeculativeMethod.NONE, 0, fixed=False)
                plain.append(rate)
                rate, stats, answers = run(runner, text, method, count, fixed=fixed)
                drafted.append(rate)
            differ = sum(ours != theirs for ours, theirs in zip(answers, truth, strict=True))
            brought = 1 + stats.accepted_tokens / max(1, stats.drafts)
            rate = acceptance(stats)
            ours, theirs = statistics.median(drafted), statistics.median(plain)
            expected = f"{expected_tokens(rate, count):.2f}" if fixed else ""
            lines.append(
                f"| {name} | {count if fixed else f'adaptive, up to {count}'} | {rate:.2f} | {brought:.2f} | "
                f"{expected} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}x"
                f"{' (other answer)' if differ else ''} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def streams() -> str:
    """Eight requests at a time; the next one starts when one ends, as in service."""
    runner = load(dtype="auto", quantization="auto")
    lines = [
        f"| text | tok/s | without | speed, median of {PAIRS} pairs | their middle half |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, text in TEXTS.items():
        rates: dict[SpeculativeMethod, list[float]] = {
            SpeculativeMethod.NONE: [],
            SpeculativeMethod.NGRAM: [],
        }
        for index in range(PAIRS):
            for method in sorted(rates, reverse=bool(index % 2)):
                rate, _, _ = run(runner, text, method, 4, fixed=False, requests=REQUESTS)
                rates[method].append(rate)
        plain, drafted = (statistics.median(values) for values in rates.values())
        pairs = [after / before for before, after in zip(*rates.values(), strict=True)]
        low, middle, high = statistics.quantiles(pairs)
        lines.append(f"| {name} | {drafted:.1f} | {plain:.1f} | {middle:.2f}x | {low:.2f}x to {high:.2f}x |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def noise() -> str:
    """Shared noise (this server) compared with rejection sampling, for drafts of three qualities."""
    windows = [window[: draft_alignment.WINDOW] for window in quality.texts(DIRECTORY, 3)]
    truth = Checkpoint.open(DIRECTORY, dtype="float32", quantization_name="none")
    ours = draft_alignment._read(truth)
    lines = [
        "| draft of the float32 model | greedy | same noise | rejection |",
        "|---|---:|---:|---:|",
    ]
    for name, found, kept in qualities(truth):
        theirs = draft_alignment._read(found)
        theirs.layers = theirs.layers[:kept]
        theirs.config = dataclasses.replace(theirs.config, layers=theirs.config.layers[:kept])
        sums, count = torch.zeros(3), 0
        for window in windows:
            both = ((ours, truth), (theirs, found))
            pairs = [logits_of(decoder, window, of.dtype) for decoder, of in both]
            for p, q in zip(*(torch.split(logits, 32) for logits in pairs), strict=True):
                sums += torch.stack([values.sum() for values in draft_alignment.agreement(p, q)])
            count += len(window)
        cells = " | ".join(f"{100 * value:.1f} %" for value in (sums / count).tolist())
        lines.append(f"| {name} | {cells} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def qualities(truth: Checkpoint) -> Iterator[tuple[str, Checkpoint, int]]:
    layers = truth.config.num_layers
    yield "its int8 copy", open_as_draft(DIRECTORY), layers
    for dropped in (2, 6):
        yield f"without its last {dropped} layers", truth, layers - dropped


@torch.inference_mode()
def ngram() -> str:
    return sweep(load(dtype="auto", quantization="auto"), SpeculativeMethod.NGRAM, repeats=3)


@torch.inference_mode()
def draft_model() -> str:
    runner = load(dtype="float32", quantization="none", draft=DIRECTORY)
    return sweep(runner, SpeculativeMethod.DRAFT_MODEL, repeats=2)


SECTIONS = {
    "ngram": ("From the prompt (n-gram), int8 model, one stream", ngram),
    "streams": (
        f"From the prompt, int8 model, up to 4 drafts, {ROWS} of {REQUESTS} requests at a time, no row empty",
        torch.inference_mode()(streams),
    ),
    "draft-model": ("An int8 copy drafts for the float32 model, one stream", draft_model),
    "noise": (
        "AcceptanceRate by the same noise and by rejection, temperature 1",
        torch.inference_mode()(noise),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    folder = RESULTS / "speculation"
    folder.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().only:
        title, measure = SECTIONS[name]
        (folder / f"{name}.md").write_text(f"## {title}\n\n{measure()}\n")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    head = (
        "# Speculative decoding of SmolLM2-135M-Instruct\n\n"
        f"{processor}, {torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}. Greedy, {LENGTH} tokens; medians of 3 runs (a draft model: 2) "
        "in turns with the same server without drafts. Command: `make bench`.\n"
    )
    parts = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    (RESULTS / "speculation.md").write_text("\n".join([head, *parts]))


if __name__ == "__main__":
    main()
