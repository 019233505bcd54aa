"""How a kernel that gates is launched: `silu_mul_triton` and `gelu_tanh_mul_triton` differ in it alone."""

from typing import Any

import torch
import triton
from torch import Tensor

from quire_kernels.configuration import Configuration

_BLOCK, _WARPS = 1024, 4


def gated_triton(op: str, kernel: Any, gate_up: Tensor, out: Tensor | None) -> Tensor:
    """``op`` by its ``kernel``: [T, 2 * size] -> [T, size]. Rows may lie apart, their elements may not."""
    tokens, width = gate_up.shape
    size = width // 2
    if width % 2 or gate_up.stride(-1) != 1:
        raise ValueError(f"{op}: gate_up must hold an even number of adjacent elements a row")
    if out is None:
        out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (tokens, size) or out.stride(-1) != 1:
        raise ValueError(f"{op}: out must be [{tokens}, {size}], its rows of adjacent elements")
    kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out


def gated_configuration(op: str, kernel: Any) -> Configuration:
    """What it is compiled as."""
    sizes = {"gate_up_stride": "i32", "out_stride": "i32", "size": "i32"}
    return Configuration(
        f"{op} bf16",
        kernel,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", **sizes},
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset(sizes),
        expects=("load128", "store128"),
        min_blocks=8,
    )
