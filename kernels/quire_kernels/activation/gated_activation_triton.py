"""Launch of the gated activation kernels, shared by `silu_mul_triton` and `gelu_tanh_mul_triton`."""

from typing import Any

import torch
import triton
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_BLOCK, _WARPS = 1024, 4


def gated_triton(op: str, kernel: Any, gate_up: Tensor, out: Tensor | None) -> Tensor:
    """Launch ``kernel``: [T, 2 * size] -> [T, size]. The elements of a row must be contiguous."""
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


def gated_launch_config(op: str, kernel: Any) -> LaunchConfig:
    """The launch config of ``kernel``."""
    sizes = {"gate_up_stride": "i32", "out_stride": "i32", "size": "i32"}
    return LaunchConfig(
        f"{op} bf16",
        kernel,
        {"gate_up_ptr": "*bf16", "out_ptr": "*bf16", **sizes},
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset(sizes),
        expects=("load128", "store128"),
        min_blocks=8,
    )
