"""Triton kernel of `fp8_quantize`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

`add_rmsnorm_fp8_triton` and `silu_mul_fp8_triton` share its device function and its checks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import FP8_GPUS, LaunchConfig


def fp8_quantize_triton(x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """As ``fp8_quantize``. The elements of a row must be contiguous."""
    tokens, size = x.shape
    if x.stride(-1) != 1:
        raise ValueError("fp8_quantize: x must hold adjacent elements a row")
    values, scales = fp8_out("fp8_quantize", tokens, size, x.device, out)
    block = triton.next_power_of_2(size)
    fp8_quantize_kernel[(tokens,)](
        x, values, scales, x.stride(0), values.stride(0), scales.stride(0), SIZE=size, BLOCK=block,
        num_warps=row_warps(block),
    )  # fmt: skip
    return values, scales


def fp8_out(
    op: str, tokens: int, size: int, device: torch.device, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The output tensors of ``op``, e4m3 [T, size] and f32 [T, 1]: ``out`` after checks, or new ones."""
    if out is None:
        values = torch.empty(tokens, size, dtype=torch.float8_e4m3fn, device=device)
        return values, torch.empty(tokens, 1, dtype=torch.float32, device=device)
    values, scales = out
    if values.shape != (tokens, size) or values.stride(-1) != 1 or values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{op}: values must be float8_e4m3fn [{tokens}, {size}], adjacent elements a row")
    if scales.shape != (tokens, 1) or scales.dtype != torch.float32:
        raise ValueError(f"{op}: scales must be float32 [{tokens}, 1]")
    return out


def row_warps(block: int) -> int:
    """Warps of a program that holds a whole row in registers."""
    return min(max(block // 512, 1), 16)


@triton.jit
def quantised_row(y):
    """f32 [BLOCK], zeros beyond the row -> (float8 e4m3 [BLOCK], its scale), as the reference rounds."""
    is_finite = tl.abs(y) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(y), 0.0), 0)
    scale = tl.div_rn(largest, 448.0)
    divisor = tl.zeros(y.shape, tl.float32) + tl.maximum(scale, 1.1754943508222875e-38)
    scaled = tl.minimum(tl.maximum(tl.div_rn(y, divisor), -448.0), 448.0)
    # A row with NaN or infinity must give NaN in the matrix product.
    kept = tl.where(tl.min(is_finite.to(tl.int32), 0) > 0, scale, float("nan"))
    return scaled.to(tl.float8e4nv), kept


@triton.jit
def fp8_quantize_kernel(
    x_ptr, values_ptr, scales_ptr, x_stride, values_stride, scales_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    values, scale = quantised_row(x)
    tl.store(values_ptr + row * values_stride + at, values, mask=inside)
    tl.store(scales_ptr + row * scales_stride, scale)


def _launch_config(size: int, dtype: str) -> LaunchConfig:
    block = triton.next_power_of_2(size)
    strides = {"x_stride": "i32", "values_stride": "i32"}
    types = {"x_ptr": f"*{dtype}", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", **strides}
    return LaunchConfig(
        f"fp8_quantize {dtype}, {size}",
        fp8_quantize_kernel,
        types,
        {"SIZE": size, "BLOCK": block, "scales_stride": 1},
        warps=row_warps(block),
        aligned=frozenset(strides),
        expects=("load128",),
        gpus=FP8_GPUS,
    )


LAUNCH_CONFIGS = (_launch_config(4096, "bf16"), _launch_config(14336, "bf16"))
