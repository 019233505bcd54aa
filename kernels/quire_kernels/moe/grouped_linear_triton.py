"""Triton kernel of the grouped matrix product: each block of rows (`group_rows`) by its owner's matrix.

The owners are experts, or LoRA adapters with their A matrices. Blocks have 16 rows where owners have few
rows, so that the product is bound by reading each matrix once, and 64 where they have many. The grid is as
large as the worst case; blocks without an owner return at once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig
from quire_kernels.moe.row_groups import RowGroups


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns and inputs per iteration, warps, stages."""

    columns: int
    depth: int
    warps: int
    stages: int


_TILES = {16: Tile(64, 128, 4, 3), 64: Tile(128, 64, 8, 3)}


def rows_at_once(rows: int, owners: int) -> int:
    """Rows per block for ``rows`` rows of ``owners`` owners."""
    return 16 if rows <= 32 * owners else 64


def grouped_linear_triton(
    x: Tensor,
    weight: Tensor,
    groups: RowGroups,
    *,
    per_row: int = 1,
    scales: Tensor | None = None,
    splits: int = 1,
) -> Tensor:
    """[splits, n, N], of which row r is x[r // per_row] @ weight[groups.of[r]].T * scales[r].

    x [n / per_row, K], weight [owners, N, K] and the result have the same dtype; scales f32 [n]. With
    ``splits`` > 1 the result holds partial sums over K, in float32. Rows without an owner are not written.
    """
    count, (_, outputs, inputs) = groups.of.shape[0], weight.shape
    blocks, size = groups.rows.shape
    if x.shape[1] != inputs or x.stride(-1) != 1 or weight.stride(-1) != 1 or x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_linear: x and weight must both hold {inputs} adjacent elements a row, of one dtype"
        )
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, count, outputs, dtype=dtype, device=x.device)
    tile = _TILES[size]
    columns = min(max(16, int(triton.next_power_of_2(outputs))), tile.columns)
    grouped_linear_kernel[(blocks, triton.cdiv(outputs, columns), splits)](
        x, weight, groups.rows, groups.owners, scales, out, count, inputs, outputs, x.stride(0),
        weight.stride(0), weight.stride(1), PER_ROW=per_row, ROWS=size, COLUMNS=columns, DEPTH=tile.depth,
        EVEN=inputs % tile.depth == 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def grouped_linear_kernel(
    x_ptr, weight_ptr, rows_ptr, owners_ptr, scales_ptr, out_ptr, count, inputs, outputs, x_stride,
    owner_stride, column_stride, PER_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(2).to(tl.int64)
    owner = tl.load(owners_ptr + block).to(tl.int64)
    if owner < 0:
        return
    row = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    there, in_columns = row < count, column < outputs
    each = tl.cdiv(tl.cdiv(inputs, DEPTH), tl.num_programs(2)) * DEPTH
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, inputs)
    x_at = x_ptr + (row // PER_ROW)[:, None] * x_stride + begin + at[None, :]
    of_columns = column.to(tl.int64)[None, :] * column_stride
    weight_at = weight_ptr + owner * owner_stride + of_columns + begin + at[:, None]
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, DEPTH):
        if EVEN:
            x = tl.load(x_at, mask=there[:, None], other=0.0)
            weight = tl.load(weight_at, mask=in_columns[None, :], other=0.0)
        else:
            inside = first + at < end
            x = tl.load(x_at, mask=there[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at, mask=in_columns[None, :] & inside[:, None], other=0.0)
        summed = tl.dot(x, weight, summed, input_precision="ieee")
        x_at += DEPTH
        weight_at += DEPTH
    if scales_ptr is not None:
        summed *= tl.load(scales_ptr + row, mask=there, other=0.0)[:, None]
    place = out_ptr + (split * count + row)[:, None] * outputs + column[None, :]
    tl.store(place, summed.to(out_ptr.dtype.element_ty), mask=there[:, None] & in_columns[None, :])


def grouped_linear_launch_config(
    what: str, rows: int, columns: int, *, per_row: int = 1, scaled: bool = False, split: bool = False,
    even: bool = True, min_blocks: int = 2,
) -> LaunchConfig:  # fmt: skip
    """Launch config for an op that uses this kernel; ``columns``: the largest N."""
    tile = _TILES[rows]
    strides = {
        "count": "i32", "inputs": "i32", "outputs": "i32", "x_stride": "i32", "owner_stride": "i32",
        "column_stride": "i32",
    }  # fmt: skip
    types = {
        "x_ptr": "*bf16", "weight_ptr": "*bf16", "rows_ptr": "*i32", "owners_ptr": "*i32",
        "out_ptr": "*fp32" if split else "*bf16", **strides,
    }  # fmt: skip
    constants: dict[str, object] = {
        "PER_ROW": per_row, "ROWS": rows, "COLUMNS": min(columns, tile.columns), "DEPTH": tile.depth,
        "EVEN": even,
    }  # fmt: skip
    if scaled:
        types["scales_ptr"] = "*fp32"
    else:
        constants["scales_ptr"] = None
    return LaunchConfig(
        what, grouped_linear_kernel, types, constants, warps=tile.warps, stages=tile.stages,
        aligned=frozenset(strides) - {"count"}, expects=("mma", "async128"), min_blocks=min_blocks,
    )  # fmt: skip
