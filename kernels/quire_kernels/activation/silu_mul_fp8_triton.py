"""Triton kernel of `silu_mul_fp8`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

One program per row, because a row has one scale.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activation.silu_mul_triton import activated
from quire_kernels.launch_config import FP8_GPUS, LaunchConfig
from quire_kernels.quantization.fp8_quantize_triton import fp8_out, quantised_row, row_warps


def silu_mul_fp8_triton(
    gate_up: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """As ``silu_mul_fp8``. The elements of a row must be contiguous."""
    tokens, width = gate_up.shape
    size = width // 2
    if width % 2 or gate_up.stride(-1) != 1:
        raise ValueError("silu_mul_fp8: gate_up must hold an even number of adjacent elements a row")
    values, scales = fp8_out("silu_mul_fp8", tokens, size, gate_up.device, out)
    block = triton.next_power_of_2(size)
    silu_mul_fp8_kernel[(tokens,)](
        gate_up, values, scales, gate_up.stride(0), values.stride(0), scales.stride(0), SIZE=size,
        BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
    return values, scales


@triton.jit
def silu_mul_fp8_kernel(
    gate_up_ptr, values_ptr, scales_ptr, gate_up_stride, values_stride, scales_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    y = activated(gate_up_ptr + row * gate_up_stride + at, SIZE, inside)
    values, scale = quantised_row(y.to(gate_up_ptr.dtype.element_ty).to(tl.float32))
    tl.store(values_ptr + row * values_stride + at, values, mask=inside)
    tl.store(scales_ptr + row * scales_stride, scale)


def _launch_config(size: int) -> LaunchConfig:
    block = triton.next_power_of_2(size)
    strides = {"gate_up_stride": "i32", "values_stride": "i32"}
    return LaunchConfig(
        f"fp8 of silu_mul bf16, {size}",
        silu_mul_fp8_kernel,
        {"gate_up_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", **strides},
        {"SIZE": size, "BLOCK": block, "scales_stride": 1},
        warps=row_warps(block),
        aligned=frozenset(strides),
        expects=("load128",),
        gpus=FP8_GPUS,
    )


LAUNCH_CONFIGS = (_launch_config(14336), _launch_config(28672))
