"""What the CPU kernels of this machine bring: engines that take turns, one without them, others with them.

A model of 100 M random parameters; each engine is a process of its own, as a server has it.

    python -m bench.cpu_kernels [--rounds N]
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.compare import table
from bench.engine_processes import EngineProcesses
from bench.engine_rates import COLUMNS, HEAD, rates, rows
from bench.tensor_parallel import FLAGS, MODEL, THREADS, write_model
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
            f"int4 beside float32, {NATIVE.isa}": (("--quantization", "int4", "--dtype", "float32"), of_this),
        }
    return ways


def measured(rounds: int) -> str:
    """Tokens per second of each engine."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_model(Path(folder), MODEL)
        engines = {
            name: stack.enter_context(
                EngineProcesses(Path(folder), (*FLAGS, *flags), threads=THREADS, variables=variables)
            )
            for name, (flags, variables) in _ways().items()
        }
        found, load = rates(engines, rounds)
    return f"{table([HEAD, *COLUMNS], rows(found))}\n\n{load}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(measured(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
