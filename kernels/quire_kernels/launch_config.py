"""How a Triton kernel is compiled and launched: `LaunchConfig`, and names of GPUs and dtypes.

Each `<op>_triton.py` lists its own configs, `all_launch_configs` collects them for the ahead-of-time compile,
the docs and the tuning. Knows no kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALL_GPUS = (80, 89, 90)  # compute capabilities: A100, L4 and L40S, H100 and H200
FP8_GPUS = (89, 90)
# What Triton calls the dtypes of a cache's elements.
TRITON_TYPES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "int8": "i8"}


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One way to compile ``kernel``, a ``triton.jit`` function.

    ``types``: Triton types of the run-time arguments ("*bf16", "i32", "fp32"). ``constants``: values of all
    other arguments; an argument that is None in a launch is the constant None. Pointers are aligned to 16
    bytes, the integers named in ``aligned`` are multiples of 16. ``registers``: maximum per thread.
    ``expects``: instructions that the machine code must contain, of "mma" (tensor cores), "wgmma" (warp-group
    tensor cores), "load128", "store128" and "async128" (128-bit accesses). ``min_blocks``: thread blocks that
    must fit on one streaming multiprocessor of an H100.
    """

    name: str  # the op and what distinguishes this config: "silu_mul bf16 14336"
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    aligned: frozenset[str] = frozenset()
    expects: tuple[str, ...] = ()
    min_blocks: int = 1
    gpus: tuple[int, ...] = field(default=ALL_GPUS)


def compute_capability(device: torch.device) -> int:
    """90 for H100 and H200; 0 for a CPU, as in Triton's interpreter."""
    return _capability(device) if device.type == "cuda" else 0


@cache  # asked at each launch, where torch takes some microseconds for the answer
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(x: Tensor) -> int:
    """Of the GPU that a tensor is on; 1 for a CPU, as in Triton's interpreter."""
    return _multiprocessors(x.device) if x.is_cuda else 1


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, float8_e4m3fn, ..."""
    return str(dtype).removeprefix("torch.")
