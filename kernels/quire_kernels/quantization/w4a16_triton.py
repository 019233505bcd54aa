"""Triton kernel of `w4a16`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

A program computes some columns; where there are few programs, the inputs are split too (split-K), and a
second kernel adds the float32 partial sums in a fixed order. A 4-bit value in the mantissa below the exponent
of 2^7 (bfloat16) or 2^10 (float16) is that power plus the value, exactly, which saves integer conversions.
The zero point is subtracted in that form and the scale is applied once per group, in float32: nothing is
rounded before the sum.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig, multiprocessors
from quire_kernels.quantization.w4_dequantize_triton import w4_dequantize_triton
from quire_kernels.quantization.w4a16_packing import W4Weight
from quire_kernels.sum_parts_triton import sum_parts_triton

MAX_SPLITS = 16
MANY_ROWS = 256  # from here on dequantize once and use cuBLAS: the kernel dequantizes for each tile of rows
_WARPS, _STAGES = 4, 4
_COLUMNS = 64


def w4a16_triton(
    x: Tensor, weight: W4Weight, bias: Tensor | None = None, *, out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """As ``w4a16``. The elements of a row must be contiguous; ``splits``: parts of the inputs (split-K)."""
    rows = x.shape[0]
    inputs, outputs = weight.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"w4a16: x must be bfloat16 or float16, not {x.dtype}")
    if x.shape[1] != inputs or x.stride(-1) != 1 or not weight.packed.is_contiguous():
        raise ValueError(f"w4a16: x must hold {inputs} adjacent elements a row, the weight be in one piece")
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != (rows, outputs) or out.stride(-1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"w4a16: out must be {x.dtype} [{rows}, {outputs}], adjacent elements a row")
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if rows >= MANY_ROWS:
        dense = w4_dequantize_triton(weight, x.dtype)
        return torch.mm(x, dense, out=out) if bias is None else torch.addmm(bias, x, dense, out=out)
    tile = row_tile(rows)
    groups = inputs // weight.group
    if splits is None:
        processors = multiprocessors(x)
        splits = w4a16_splits(rows, outputs, groups, processors)
    parts = out
    if splits > 1:
        parts = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    w4a16_kernel[(triton.cdiv(outputs, _COLUMNS), triton.cdiv(rows, tile), splits)](
        x, weight.packed, weight.scales, weight.zeros, bias if splits == 1 else None, parts,
        rows, outputs, groups, x.stride(0), parts.stride(-2), parts.stride(0) if splits > 1 else 0,
        GROUP=weight.group, ROWS=tile, COLUMNS=_COLUMNS, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if splits > 1:
        sum_parts_triton(parts, out, bias)
    return out


def row_tile(rows: int) -> int:
    """Rows per program: tensor cores take at least 16, and 64 would spill registers on sm_89."""
    return 16 if rows <= 16 else 32


def w4a16_splits(rows: int, outputs: int, groups: int, processors: int) -> int:
    """Parts of the inputs that give two programs per multiprocessor; a power of two."""
    programs = triton.cdiv(outputs, _COLUMNS) * triton.cdiv(rows, row_tile(rows))
    wanted = min(2 * processors // max(programs, 1), groups, MAX_SPLITS)
    return 1 << (max(int(wanted), 1).bit_length() - 1)


@triton.jit(do_not_specialize=["rows"])
def w4a16_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, bias_ptr, parts_ptr, rows, outputs, groups, x_stride,
    parts_stride, split_stride, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = GROUP // 2
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, HALF)
    in_rows, in_columns = row < rows, column < outputs
    each = tl.cdiv(groups, tl.num_programs(2))
    begin = tl.program_id(2) * each
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + begin * GROUP + at[None, :]
    packed_at = packed_ptr + (begin.to(tl.int64) * HALF + at)[:, None] * outputs + column[None, :]
    of_group = begin.to(tl.int64) * outputs + column
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(begin, tl.minimum(begin + each, groups)):
        low = tl.load(x_at, mask=in_rows[:, None], other=0.0)
        high = tl.load(x_at + HALF, mask=in_rows[:, None], other=0.0)
        packed = tl.load(packed_at, mask=in_columns[None, :], other=0)
        scale = tl.load(scales_ptr + of_group, mask=in_columns, other=0.0).to(tl.float32)
        zero = _offset(tl.load(zeros_ptr + of_group, mask=in_columns, other=0), low.dtype)
        product = tl.dot(low, _offset(packed & 0xF, low.dtype) - zero[None, :])
        product = tl.dot(high, _offset(packed >> 4, low.dtype) - zero[None, :], product)
        summed += product * scale[None, :]
        x_at += GROUP
        packed_at += HALF * outputs
        of_group += outputs
    if bias_ptr is not None:
        summed += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = parts_ptr + tl.program_id(2).to(tl.int64) * split_stride
    place += row.to(tl.int64)[:, None] * parts_stride
    inside = in_rows[:, None] & in_columns[None, :]
    tl.store(place + column[None, :], summed.to(parts_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _offset(small, dtype: tl.constexpr):
    """An integer below 128 as a float, plus a power of two that is the same for all of them."""
    if dtype == tl.bfloat16:
        lifted = (small.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        lifted = (small.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    return lifted


def _launch_config(
    group: int, rows: int, *, dtype: str = "bf16", scales: str = "fp16", split: bool = True,
) -> LaunchConfig:  # fmt: skip
    tile = row_tile(rows)
    strides = {
        "rows": "i32", "outputs": "i32", "groups": "i32", "x_stride": "i32", "parts_stride": "i32",
        "split_stride": "i32",
    }  # fmt: skip
    types = {
        "x_ptr": f"*{dtype}", "packed_ptr": "*u8", "scales_ptr": f"*{scales}", "zeros_ptr": "*u8",
        "parts_ptr": "*fp32" if split else f"*{dtype}", **strides,
    }  # fmt: skip
    return LaunchConfig(
        f"w4a16 {dtype}, groups of {group}, scales {scales}: {tile} rows" + ("" if split else ", 1 split"),
        w4a16_kernel,
        types,
        {"bias_ptr": None, "GROUP": group, "ROWS": tile, "COLUMNS": _COLUMNS},
        warps=_WARPS,
        stages=_STAGES,
        aligned=frozenset({"outputs", "x_stride", "parts_stride", "split_stride"}),
        expects=("mma", "async128") if group > 32 else ("mma",),
        min_blocks=3,
    )


LAUNCH_CONFIGS = (
    _launch_config(128, 1),
    _launch_config(128, 1, split=False),
    _launch_config(128, 32),
    _launch_config(128, 1, dtype="fp16"),
    _launch_config(64, 1, scales="bf16"),
    _launch_config(64, 32),
    _launch_config(32, 1),
)
