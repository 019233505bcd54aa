"""What it costs to divide a model among ranks, on this machine: python -m bench.distributed [--only SECTION]

Each section writes a table to bench/results/distributed/, so that one of them can be repeated;
bench/results/distributed.md has all of them, with machine, load and command.
"""

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from bench import all_reduce, step_message
from bench.compare import table
from bench.tensor_parallel import NEW_TOKENS, PROMPT, ROUNDS, tensor_parallel

RESULTS = Path(__file__).parent / "results"
SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "tensor": (
        f"Two ranks with one thread each beside one process with two, on a random Llama of 100 M parameters "
        f"in int8 (medians of {ROUNDS} rounds in turns, the ratios of pairs; {NEW_TOKENS - 1} tokens after "
        f"prompts of {PROMPT})",
        tensor_parallel,
    ),
    "all-reduce": ("An all-reduce of float32", all_reduce.tables),
    "step-message": (
        "The message of a step, from rank 0 to the other ranks and back",
        lambda: table(step_message.HEADS, step_message.rows()),
    ),
}


def machine(name: str) -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    return (
        f"{processor}, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f} before; "
        f"Python {platform.python_version()}, torch {torch.__version__}. Command: `python -m "
        f"bench.distributed --only {name}`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    folder = RESULTS / "distributed"
    folder.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().only:
        title, measure = SECTIONS[name]
        where = machine(name)  # before, because measuring is a load
        text = f"## {title}\n\n{measure()}\n\n{where}\n"
        print(text, flush=True)
        (folder / f"{name}.md").write_text(text)
    parts = [path.read_text() for name in SECTIONS if (path := folder / f"{name}.md").exists()]
    (RESULTS / "distributed.md").write_text("\n".join(["# A model divided among ranks on a CPU\n", *parts]))


if __name__ == "__main__":
    main()
