"""What a Triton kernel is compiled as: how each is launched, for whoever compiles without launching.

Named beside each kernel (`<op>_triton.py`), gathered by `configurations`, read by the ahead-of-time compile,
the docs and the tuning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_GPUS = (80, 89, 90)  # compute capabilities: A100, L4 and L40S, H100 and H200
FP8_GPUS = (89, 90)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to compile ``kernel``, a ``triton.jit`` function.

    ``types`` name the types of run-time arguments ("*bf16", "i32", "fp32"), ``constants`` the values of all
    others; an argument that is None in a launch is a constant None. Pointers are on 16 bytes, the integers
    in ``aligned`` multiples of 16. ``registers`` bounds those of a thread. ``expects``: what the machine code
    must show, of "mma" (tensor cores), "wgmma" (those of a warp group), "load128", "store128" and "async128"
    (128-bit accesses); ``min_blocks``: so many must fit on a streaming multiprocessor of an H100.
    """

    name: str  # of the op and what sets this one apart: "silu_mul bf16 14336"
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
