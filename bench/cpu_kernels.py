"""What the CPU kernels of this machine bring: engines that take turns, one without them, others with them.

A model of 100 M random parameters; each engine is a process of its own, as a server has it.

    python -m bench.cpu_kernels [--rounds N]
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.compare import table
from bench.engine_processes import EngineProcesses
from bench.tensor_parallel import (
    DECODES,
    FLAGS,
    MODEL,
    NEW_TOKENS,
    PREFILL,
    PROMPT,
    THREADS,
    Rates,
    write_model,
)
from quire_kernels import NATIVE
from quire_kernels.cpu.native import ISA_VARIABLE

_FLOAT32 = ("--quantization", "none", "--dtype", "float32")
ROUNDS = 5


def _ways() -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """(flags, environment) of each engine."""
    ways: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "float32, torch": (_FLOAT32, {ISA_VARIABLE: "none"})
    }
    if NATIVE is not None:
        of_this: dict[str, str] = {ISA_VARIABLE: NATIVE.isa}
        ways |= {
            f"float32, {NATIVE.isa}": (_FLOAT32, of_this),
            f"int8 beside float32, {NATIVE.isa}": (("--quantization", "int8", "--dtype", "float32"), of_this),
            f"int8 beside bfloat16, {NATIVE.isa}": (
                ("--quantization", "int8", "--dtype", "bfloat16"),
                of_this,
            ),
        }
    return ways


def measured(rounds: int) -> str:
    """Tokens per second of each engine."""
    columns = {f"decode x{count}": (PROMPT, count) for count in DECODES} | {
        f"prefill {PREFILL}": (PREFILL, 1)
    }
    ways = _ways()
    rates = {name: {column: Rates() for column in columns} for name in ways}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_model(Path(folder), MODEL)
        engines = {
            name: stack.enter_context(
                EngineProcesses(Path(folder), (*FLAGS, *flags), threads=THREADS, variables=variables)
            )
            for name, (flags, variables) in ways.items()
        }
        for number in range(rounds):
            for column, (length, count) in columns.items():
                for name, engine in engines.items():
                    new_tokens = 2 if length == PREFILL else NEW_TOKENS
                    prefill, *steps = (step["seconds"] for step in engine.run(length, count, new_tokens))
                    tokens = length if length == PREFILL else count
                    rates[name][column].add(tokens, [prefill] if length == PREFILL else steps)
            loads.append(os.getloadavg()[0])
            print(f"round {number}: load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    rows = [
        [name, *(f"{statistics.median(each.rounds):.0f} ({each.best:.0f})" for each in found.values())]
        for name, found in rates.items()
    ]
    found = table(["tokens per second: median step (fastest step)", *columns], rows)
    return f"{found}\n\nLoad average in the rounds: {min(loads):.1f} to {max(loads):.1f}."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(measured(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
