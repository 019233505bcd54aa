"""Compiles every launch config of the Triton kernels and every recorded compile key of serving ahead of
time, without a GPU, for each of its GPUs, and reads registers, spills, shared memory and instructions from
the machine code. Writes bench/results/aot.json, which docs/kernels.md shows and tests/kernels/test_aot.py
compares with the code.

    python -m bench.aot                  # compile what has changed; refuses to write what got worse
    python -m bench.aot --accept-worse   # write it all the same
    python -m bench.aot --only rope      # print these and write nothing

It does not measure speed. The programs that read the machine code come with triton.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench import serving_keys
from quire_kernels.all_launch_configs import LAUNCH_CONFIGS
from quire_kernels.launch_config import LaunchConfig

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bench" / "results" / "aot.json"
_CACHE = ROOT / ".cache" / "triton"
_PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_REGISTERS, _WARP, _TENSOR_COLUMNS = 65_536, 32, 512
# On sm_120 ptxas keeps to 96 or 168 registers, at the cost of up to 4 instructions that spill.
_SPILLS = {120: 4}
# Of tensor cores: HMMA and IMMA by a warp, HGMMA and QGMMA by a warp group, UTC*MMA by a block.
_INSTRUCTIONS = {
    "mma": r"\b(?:UTC[HIQ]|[HIQ]G?)MMA\b",
    "wgmma": r"\b[HIQ]GMMA\b",
    "load128": r"\bLDG\.E\.\S*128",
    "store128": r"\bSTG\.E\.\S*128",
    "async128": r"\bLDGSTS\S*128",
    "spills": r"\b(?:LDL|STL)\b",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """Limits of a streaming multiprocessor; NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities"."""

    shared: int
    shared_per_block: int
    warps: int
    blocks: int


GPUS = {
    80: Gpu(164 * 1024, 163 * 1024, 64, 32),
    86: Gpu(100 * 1024, 99 * 1024, 48, 16),
    89: Gpu(100 * 1024, 99 * 1024, 48, 24),
    90: Gpu(228 * 1024, 227 * 1024, 64, 32),
    100: Gpu(228 * 1024, 227 * 1024, 64, 32),
    120: Gpu(100 * 1024, 99 * 1024, 48, 24),
}


@dataclass(frozen=True, slots=True)
class Row:
    """``blocks``: thread blocks per multiprocessor; ``source``: a hash of the compiler's input;
    ``tensor_columns``: of sm_100's tensor memory.
    """

    name: str
    gpu: int
    source: str
    registers: int
    shared: int
    spills: int
    blocks: int
    mma: int
    wgmma: int
    load128: int
    store128: int
    async128: int
    tensor_columns: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.gpu


def source_of(configuration: LaunchConfig, gpu: int) -> str:
    """A hash of the compiler's input, independent of the code around the kernel."""
    options = (
        configuration.warps,
        configuration.stages,
        configuration.registers,
        sorted(configuration.aligned),
    )
    given = (
        triton.__version__, gpu, options, sorted(configuration.types.items()),
        sorted(configuration.constants.items()), sorted(_sources(configuration.kernel)),
    )  # fmt: skip
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


def _sources(kernel: JITFunction) -> set[str]:
    found = {kernel.src}
    for name in kernel.fn.__code__.co_names:
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, JITFunction) and value.fn.__module__.startswith("quire_kernels"):
            found |= _sources(value)
        elif isinstance(value, triton.language.constexpr):
            found.add(f"{name} = {value.value!r}")
    return found


def compiled(configuration: LaunchConfig, gpu: int) -> Row:
    """Compile it and read the machine code; a compiler error names the launch config."""
    # A multiply and the sum after it round once: torch's own kernels are compiled so.
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    triton.knobs.cache.dir = str(_CACHE)
    names = configuration.kernel.arg_names
    wrong = set(names) ^ (configuration.types.keys() | configuration.constants.keys())
    if wrong:
        raise ValueError(
            f"{configuration.name}: arguments without a type or a value, or unknown: {sorted(wrong)}"
        )
    types = {name: configuration.types.get(name, "constexpr") for name in names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in configuration.aligned
    }
    source = ASTSource(
        fn=configuration.kernel, signature=types, constexprs=dict(configuration.constants), attrs=attributes
    )
    options = {"num_warps": configuration.warps, "num_stages": configuration.stages}
    if configuration.registers is not None:
        options["maxnreg"] = configuration.registers
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", gpu, _WARP), options=options)
    except Exception as error:
        raise RuntimeError(f"{configuration.name} does not compile for sm_{gpu}: {error}") from error
    registers, code = _read(kernel.asm["cubin"])
    found = {name: len(re.findall(pattern, code)) for name, pattern in _INSTRUCTIONS.items()}
    shared = int(kernel.metadata.shared)
    columns = int(getattr(kernel.metadata, "tmem_size", 0) or 0)
    blocks = _blocks(GPUS[gpu], registers, shared, configuration.warps)
    if columns:
        blocks = min(blocks, _TENSOR_COLUMNS // columns)
    source_hash = source_of(configuration, gpu)
    found |= {"blocks": blocks, "tensor_columns": columns}
    return Row(configuration.name, gpu, source_hash, registers, shared, **found)


def _read(binary: bytes) -> tuple[int, str]:
    """(registers per thread, the instructions as text)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        usage, code = (
            subprocess.run([_PROGRAMS / program, option, file], capture_output=True, text=True, check=True)
            for program, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {usage.stdout}{usage.stderr}")
    return int(found[1]), code.stdout


def _blocks(gpu: Gpu, registers: int, shared: int, warps: int) -> int:
    """Registers are allocated in multiples of 8 per thread; the system reserves 1 KiB of shared memory."""
    by_registers = _REGISTERS // (-(-registers // 8) * 8 * _WARP * warps)
    return min(by_registers, gpu.shared // (shared + 1024), gpu.warps // warps, gpu.blocks)


def faults(row: Row, configuration: LaunchConfig) -> list[str]:
    """Properties of the machine code that would be slow or fail at launch."""
    said = []
    if row.spills > _SPILLS.get(row.gpu, 0):
        said.append(f"{row.spills} instructions spill registers")
    if row.shared > GPUS[row.gpu].shared_per_block:
        said.append(f"{row.shared} bytes of shared memory, of {GPUS[row.gpu].shared_per_block}")
    if row.tensor_columns > _TENSOR_COLUMNS:
        said.append(f"{row.tensor_columns} columns of tensor memory, of {_TENSOR_COLUMNS}")
    if row.blocks < (configuration.min_blocks if row.gpu == 90 else 1):
        said.append(f"{row.blocks} blocks fit on a multiprocessor, not {configuration.min_blocks}")
    said += [f"no {what}" for what in configuration.expects if not getattr(row, what)]
    return [f"{row.name}, sm_{row.gpu}: {text}" for text in said]


def worse(new: Row, old: Row) -> list[str]:
    """Regressions against the old row."""
    pairs = (("registers", new.registers, old.registers), ("spills", new.spills, old.spills))
    said = [f"{name} {before} -> {after}" for name, after, before in pairs if after > before]
    if new.blocks < old.blocks:
        said.append(f"blocks on a multiprocessor {old.blocks} -> {new.blocks}")
    return [f"{new.name}, sm_{new.gpu}: {text}" for text in said]


def table() -> dict[tuple[str, int], Row]:
    """The committed table."""
    rows = [Row(**row) for row in json.loads(TABLE.read_text())] if TABLE.exists() else []
    return {row.key: row for row in rows}


@cache
def wanted() -> dict[tuple[str, int], LaunchConfig]:
    every = (*LAUNCH_CONFIGS, *serving_keys.launch_configs())
    return {(each.name, gpu): each for each in every for gpu in each.gpus}


def compile_all(keys: Iterable[tuple[str, int]]) -> list[Row]:
    """Compile in one process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_compiled_by_key, list(keys)))


def _compiled_by_key(key: tuple[str, int]) -> Row:
    return compiled(wanted()[key], key[1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.aot", description=__doc__)
    parser.add_argument("--accept-worse", action="store_true", help="write what got worse, too")
    parser.add_argument("--only", metavar="TEXT", help="print the configurations whose names hold TEXT")
    options = parser.parse_args(arguments)
    configurations, old = wanted(), table()
    if options.only is not None:
        keys = [key for key in configurations if options.only in key[0]]
    else:
        keys = [
            key
            for key, each in configurations.items()
            if key not in old or old[key].source != source_of(each, key[1])
        ]
    new = {row.key: row for row in compile_all(keys)}
    for row in new.values():
        shown: dict[str, Any] = {k: v for k, v in asdict(row).items() if k not in ("name", "gpu", "source")}
        print(f"{row.name}, sm_{row.gpu}:", *(f"{key} {value}" for key, value in shown.items()), sep="  ")
    refused = [text for row in new.values() for text in faults(row, configurations[row.key])]
    grown = [text for row in new.values() if row.key in old for text in worse(row, old[row.key])]
    print(*refused, *grown, sep="\n", file=sys.stderr)
    if options.only is not None:
        return bool(refused)
    if refused or (grown and not options.accept_worse):
        return 1
    rows = [new.get(key) or old[key] for key in configurations]
    TABLE.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
