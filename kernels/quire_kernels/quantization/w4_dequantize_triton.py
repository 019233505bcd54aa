"""Triton kernel that dequantizes 4-bit weights to 16 bits: for many rows, cuBLAS on these is faster."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig
from quire_kernels.quantization.w4a16_packing import W4Weight

_COLUMNS, _WARPS = 64, 4


def w4_dequantize_triton(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """[K, N] in ``dtype``, rows in the order of the groups, each element rounded once."""
    inputs, outputs = weight.shape
    out = torch.empty(inputs, outputs, dtype=dtype, device=weight.packed.device)
    w4_dequantize_kernel[(inputs // weight.group, triton.cdiv(outputs, _COLUMNS))](
        weight.packed, weight.scales, weight.zeros, out, outputs, GROUP=weight.group, COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def w4_dequantize_kernel(
    packed_ptr, scales_ptr, zeros_ptr, out_ptr, outputs, GROUP: tl.constexpr, COLUMNS: tl.constexpr
):
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, HALF)
    inside = (column < outputs)[None, :]
    place = at[:, None] * outputs + column[None, :]
    packed = tl.load(packed_ptr + group * HALF * outputs + place, mask=inside, other=0)
    of_group = group * outputs + column
    scale = tl.load(scales_ptr + of_group, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    zero = tl.load(zeros_ptr + of_group, mask=column < outputs, other=0).to(tl.float32)[None, :]
    out_at = out_ptr + group * GROUP * outputs + place
    low, high = (packed & 0xF).to(tl.float32), (packed >> 4).to(tl.float32)
    tl.store(out_at, ((low - zero) * scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at + HALF * outputs, ((high - zero) * scale).to(out_ptr.dtype.element_ty), mask=inside)


def _launch_config(group: int) -> LaunchConfig:
    return LaunchConfig(
        f"w4_dequantize bf16, groups of {group}",
        w4_dequantize_kernel,
        {
            "packed_ptr": "*u8",
            "scales_ptr": "*fp16",
            "zeros_ptr": "*u8",
            "out_ptr": "*bf16",
            "outputs": "i32",
        },
        {"GROUP": group, "COLUMNS": _COLUMNS},
        warps=_WARPS,
        aligned=frozenset({"outputs"}),
        expects=("load128", "store128"),
        min_blocks=4,
    )


LAUNCH_CONFIGS = (_launch_config(128), _launch_config(64))
