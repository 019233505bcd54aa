"""Speed on a CPU beside transformers and llama.cpp, in one run: bench/cpu.py [--only SECTION ...] [--busy]

Each section leaves a table in bench/results/cpu/, so that a run can go on where it stopped;
bench/results/cpu.md is all of them, with machine, versions and command. Never imported.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path

import peers
import quality
import torch
from interference import interference
from prefix_hit import prefix_hit
from through_http import through_http

from e2e import models

RESULTS = Path(__file__).parent / "results"
STREAMS = (1, 4, 8, 16, 32)
REPEATS = 3
DIRECTORY = models.smollm2()
GGUF = models.CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMATS = ("Q4_1", "Q4_0", "Q8_0")
PACKAGES = ("torch", "transformers", "llama-cpp-python")


def prompts(count: int, length: int) -> list[list[int]]:
    """Random tokens: no two prompts share a prefix."""
    rng = random.Random(count * length)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def engines(names: list[str], streams: int) -> dict[str, peers.Engine]:
    threads = torch.get_num_threads()
    made: dict[str, peers.Engine] = {}
    for name in names:
        if name == "transformers":
            made[name] = peers.Transformers(DIRECTORY)
        elif name.startswith("quire"):
            _, dtype, quantization = name.split()
            made[name] = peers.Quire(DIRECTORY, dtype=dtype, quantization=quantization)
        else:
            kind = name.split()[1]
            gguf = GGUF if kind == "Q4_1" else peers.requantised(GGUF, kind)
            made[name] = peers.LlamaCpp(gguf, streams, threads)
    return made


NAMES = [
    "transformers",
    *(f"llama.cpp {kind}" for kind in FORMATS),
    "quire float32 none",
    "quire bfloat16 none",
    "quire auto int8",
]


def decode(length: int, new_tokens: int, streams: tuple[int, ...] = STREAMS, repeats: int = REPEATS) -> str:
    """Tokens a second of all streams: median of the runs' median steps, and the fastest step."""
    heads = [f"x{count}" for count in streams]
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    fastest: dict[str, list[float]] = {name: [] for name in NAMES}
    shared = engines([name for name in NAMES if not name.startswith("llama")], 1)
    for count in streams:
        running = {**shared, **engines([n for n in NAMES if n.startswith("llama")], count)}
        batch = prompts(count, length)
        steps: dict[str, list[list[float]]] = {name: [] for name in NAMES}
        for _ in range(repeats):  # in turns, so that a busy moment of the machine meets all of them
            for name in NAMES:
                steps[name].append(running[name].run(batch, new_tokens)[1])
        for name in NAMES:
            rates[name].append(count / statistics.median(statistics.median(run) for run in steps[name]))
            fastest[name].append(count / min(min(run) for run in steps[name]))
            note(
                f"decode {length} x{count} {name}: {rates[name][-1]:.0f} tok/s, best {fastest[name][-1]:.0f}"
            )
        for engine in running.values():
            if isinstance(engine, peers.LlamaCpp):
                engine.close()
    return compared(heads, rates, fastest)


def compared(heads: list[str], rates: dict[str, list[float]], fastest: dict[str, list[float]]) -> str:
    rows = [
        [name, *(f"{a:.0f} ({b:.0f})" for a, b in zip(rates[name], fastest[name], strict=True))]
        for name in NAMES
    ]
    ours = rates["quire auto int8"]
    best = [max(rates[n][i] for n in NAMES if n.startswith("llama")) for i in range(len(heads))]
    rows.append(
        ["int8 / transformers", *(f"{a / b:.1f}x" for a, b in zip(ours, rates["transformers"], strict=True))]
    )
    rows.append(["int8 / best llama.cpp", *(f"{a / b:.2f}x" for a, b in zip(ours, best, strict=True))])
    return table(["tok/s: median (best step)", *heads], rows)


def prefill() -> str:
    """Prompt tokens a second of one prompt."""
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    fastest: dict[str, list[float]] = {name: [] for name in NAMES}
    running = engines(NAMES, 1)
    for length in (128, 1024):
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for _ in range(REPEATS):
            for name in NAMES:
                seconds[name].append(running[name].run(prompts(1, length), 2)[0])
        for name in NAMES:
            rates[name].append(length / statistics.median(seconds[name]))
            fastest[name].append(length / min(seconds[name]))
            note(f"prefill {length} {name}: {rates[name][-1]:.0f} tok/s, best {fastest[name][-1]:.0f}")
    return compared(["128 tokens", "1024 tokens"], rates, fastest)


SECTIONS = {
    "decode": ("Decode after prompts of 128 tokens", lambda: decode(128, 64)),
    "decode-long": (
        "Decode after prompts of 1,024 tokens (one run each)",
        lambda: decode(1024, 64, (1, 8, 16), 1),
    ),
    "prefill": ("Prefill of one prompt", prefill),
    "prefix": ("Time to the first token with a cached prefix of 1,024 tokens", lambda: prefix_hit(DIRECTORY)),
    "interference": ("8 streams while a 10,000-token prompt comes in", lambda: interference(DIRECTORY)),
    "http": (
        "Through HTTP: 32 clients, prompts of 128 tokens, 128 new ones",
        lambda: through_http(DIRECTORY),
    ),
    "quality": ("What int8 costs in quality", lambda: quality.compare(DIRECTORY)),
}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine(busy: bool) -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    clock = "one thread and CPU time (--busy: the machine had other work)" if busy else "wall time"
    return (
        f"{processor}, {torch.get_num_threads()} threads, {clock}; "
        f"Python {platform.python_version()}, {versions}. "
        f"Medians of {REPEATS} runs taken in turns. Command: `make bench`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--busy", action="store_true", help="one thread and CPU time: ratios on a busy machine"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.busy else 2)
    if arguments.busy:
        time.perf_counter = time.process_time  # for everything that measures below
    folder = RESULTS / "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        title, measure = SECTIONS[name]
        text = f"## {title}\n\n{measure()}\n\n{machine(arguments.busy)}\n"
        print(text, flush=True)
        (folder / f"{name}.md").write_text(text)
    parts = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    (RESULTS / "cpu.md").write_text("\n".join(["# SmolLM2-135M-Instruct on a CPU\n", *parts]))


if __name__ == "__main__":
    main()
