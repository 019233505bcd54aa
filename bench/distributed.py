"""What it costs to divide a model among ranks, on this machine: python -m bench.distributed [--only SECTION]

Each section writes a table to bench/results/distributed/, so that one of them can be repeated, and each
kind of CPU has tables of its own; bench/results/distributed.md has all of them, with machine, load and
command.
"""

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from bench import (
    all_reduce,
    cut_links,
    pipeline,
    prefill_decode,
    rank_exchanges,
    rank_losses,
    rank_shards,
    step_message,
)
from bench.engine_rates import NEW_TOKENS, PROMPT
from bench.tensor_parallel import ROUNDS, WEIGHTS, tensor_parallel
from e2e import models
from quire_server.layers.int8_linear import native_kernels

RESULTS = Path(__file__).parent / "results"
TRANSFERS = 21
STAGE_SECONDS, STAGE_TOKENS = (0.2, 0.2, 0.2), 30


def _tensor(flags: Sequence[str], _: argparse.Namespace) -> str:
    return tensor_parallel(flags)


SECTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    **{
        f"tensor-{weights}": (
            "Two ranks with one thread each beside one process with two, on a random Llama of 100 M "
            f"parameters in {weights} ({ROUNDS} rounds in turns; {NEW_TOKENS - 1} tokens after prompts of "
            f"{PROMPT}; bar: 0.9x)",
            partial(_tensor, flags),
        )
        for weights, flags in WEIGHTS.items()
    },
    "all-reduce": ("An all-reduce of float32", lambda _: all_reduce.tables()),
    "step-message": (
        "The message of a step, from rank 0 to the other ranks and back (bars for 256 requests: 50 us to one "
        "peer, 100 us to three, 24 bytes a request)",
        lambda _: step_message.report(),
    ),
    "exchanges": (
        "What ranks exchange in a step (formula: 2 L + 1 sums and 1 gather)",
        lambda _: rank_exchanges.report(),
    ),
    "shards": (
        "What a rank reads and holds of a model of 100 M parameters; of the ranks that with most (bound: "
        "total / t + vectors + 2 %)",
        lambda _: rank_shards.report(),
    ),
    "pipeline": (
        "Utilisation of a pipeline of 3 stages beside min(1, streams / stages) x mean / max (bar: 5 points; "
        f"each stage takes {1000 * STAGE_SECONDS[0]:.0f} ms by sleeping, so that none waits for a core)",
        lambda _: pipeline.report(STAGE_SECONDS, STAGE_TOKENS),
    ),
    "losses": (
        "A rank that is killed or stopped (bars: all ended within 2 s and 5 s, every stream with an error "
        "event, nothing left; ready within the load time + 10 s)",
        lambda arguments: rank_losses.report(arguments.losses),
    ),
    "cut-link": (
        "The link between two nodes of a group is cut (bar: 5 s)",
        lambda _: cut_links.report(),
    ),
    "transfer": (
        "Prefill and decode apart: what fetching the KV blocks of SmolLM2-135M adds to the time to the first "
        "token (bar: bytes / (1 GB/s) + 10 ms)",
        lambda _: prefill_decode.compare(models.smollm2(), (256, 512, 1024, 1536), TRANSFERS),
    ),
}
#: Of tests, written by hand.
TESTS = "tests.md"


def machine(name: str, options: str) -> str:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line for line in lines if line.startswith("model name")).split(":")[1].strip()
    cores, load, day = len(os.sched_getaffinity(0)), os.getloadavg()[0], datetime.now(UTC).date()
    return (
        f"{processor} ({native_kernels()}), {cores} cores, {day}, load average {load:.1f} before; "
        f"Python {platform.python_version()}, torch {torch.__version__}. "
        f"Command: `python -m bench.distributed --only {name}{options}`."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--losses", type=int, default=rank_losses.LOSSES, help="of each kind")
    arguments = parser.parse_args()
    folder = RESULTS / "distributed"
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        title, measure = SECTIONS[name]
        options = f" --losses {arguments.losses}" if name == "losses" else ""
        where = machine(name, options)  # before, because measuring is a load
        text = f"## {title}\n\n{measure(arguments)}\n\n{where}\n"
        print(text, flush=True)
        (folder / f"{name}.{native_kernels()}.md").write_text(text)
    (RESULTS / "distributed.md").write_text(page(folder))


def page(folder: Path) -> str:
    """All parts, those of earlier runs and of other CPUs too."""
    parts = ["# A model divided among ranks on a CPU\n"]
    for name, (title, _) in SECTIONS.items():
        found = [path.read_text() for path in sorted(folder.glob(f"{name}.*.md"))]
        parts += found or [f"## {title}\n\nNot measured.\n"]
    return "\n".join([*parts, (folder / TESTS).read_text()])


if __name__ == "__main__":
    main()
