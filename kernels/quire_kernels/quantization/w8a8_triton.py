"""Triton kernels around the INT8 product of `w8a8`: one rounds its input, one scales its sums. Imported only
where there is a GPU (why: `add_rmsnorm_triton`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig
from quire_kernels.quantization.fp8_quantize_triton import row_warps

_BLOCK, _WARPS = 1024, 4


def quantize_rows_triton(x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """As ``quantize_rows`` to int8, x [T, K] -> (int8 [``num_rows``, K], scales f32 [T]). Rows from T on are
    not written. The elements of a row must be contiguous.
    """
    tokens, size = x.shape
    if x.stride(-1) != 1:
        raise ValueError("w8a8: x must hold adjacent elements a row")
    values = torch.empty(num_rows, size, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    int8_quantize_kernel[(tokens,)](
        x, values, scales, x.stride(0), SIZE=size, BLOCK=block, num_warps=row_warps(block)
    )
    return values, scales


def scale_sums_triton(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """sums int32 [T, N] * row_scales f32 [T] * scales f32 [N] + bias [N] in float32, rounded to ``dtype``."""
    rows, size = sums.shape
    out = torch.empty(rows, size, dtype=dtype, device=sums.device)
    scale_sums_kernel[(rows, triton.cdiv(size, _BLOCK))](
        sums, row_scales, scales, bias, out, SIZE=size, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out


@triton.jit
def int8_quantize_kernel(x_ptr, values_ptr, scales_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.abs(x) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(x), 0.0), 0)
    scale = tl.div_rn(largest, 127.0)
    divisor = tl.zeros([BLOCK], tl.float32) + tl.maximum(scale, 1.1754943508222875e-38)
    scaled = tl.minimum(tl.maximum(tl.div_rn(tl.where(is_finite, x, 0.0), divisor), -127.0), 127.0)
    rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
    tl.store(values_ptr + row * SIZE + at, rounded.to(tl.int8), mask=inside)
    # A row with NaN or infinity must give NaN.
    tl.store(scales_ptr + row, tl.where(tl.min(is_finite.to(tl.int32), 0) > 0, scale, float("nan")))


@triton.jit
def scale_sums_kernel(
    sums_ptr, row_scales_ptr, scales_ptr, bias_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    y = tl.load(sums_ptr + row * SIZE + at, mask=inside, other=0).to(tl.float32)
    y = y * tl.load(row_scales_ptr + row) * tl.load(scales_ptr + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def _quantize(size: int) -> LaunchConfig:
    block = triton.next_power_of_2(size)
    return LaunchConfig(
        f"w8a8, int8 of bf16, {size}",
        int8_quantize_kernel,
        {"x_ptr": "*bf16", "values_ptr": "*i8", "scales_ptr": "*fp32", "x_stride": "i32"},
        {"SIZE": size, "BLOCK": block},
        warps=row_warps(block),
        aligned=frozenset({"x_stride"}),
        expects=("load128",),
    )


def _scale(size: int, bias: bool) -> LaunchConfig:
    types = {"sums_ptr": "*i32", "row_scales_ptr": "*fp32", "scales_ptr": "*fp32", "out_ptr": "*bf16"}
    constants: dict[str, object] = {"SIZE": size, "BLOCK": _BLOCK}
    if bias:
        types["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    return LaunchConfig(
        f"w8a8, sums scaled, {size}" + (", bias" if bias else ""),
        scale_sums_kernel,
        types,
        constants,
        warps=_WARPS,
        expects=("load128",),
        min_blocks=8,
    )


LAUNCH_CONFIGS = (_quantize(4096), _quantize(14336), _scale(4096, False), _scale(6144, True))
