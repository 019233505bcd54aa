"""Triton kernels of `add_lora`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

Shrink (A x) and expand (B A x), one launch each for all tokens, adapters and parts of the layer. Shrink has
few columns and many inputs, so its inputs are split over programs (split-K); expand adds the partial sums in
a fixed order as it reads them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig, multiprocessors
from quire_kernels.moe.grouped_linear_triton import grouped_linear_launch_config, grouped_linear_triton
from quire_kernels.moe.row_groups import RowGroups

MAX_SPLITS = 8
_LEAST_INPUTS = 256  # per program of the shrink kernel
_COLUMNS, _WARPS = 128, 4


def add_lora_triton(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: RowGroups, sizes: tuple[int, ...]
) -> Tensor:
    """As ``add_lora``. The elements of a row must be contiguous."""
    (tokens, inputs), (count, outputs, rank) = x.shape, b.shape
    if not 0 < len(sizes) <= 3 or sum(sizes) != outputs or a.shape != (count, len(sizes) * rank, inputs):
        raise ValueError(
            f"add_lora: {len(sizes)} parts of {list(sizes)} columns, a {list(a.shape)} and b {list(b.shape)} "
            "do not fit"
        )
    if y.shape != (tokens, outputs) or y.stride(-1) != 1 or not b.is_contiguous() or b.dtype != x.dtype:
        raise ValueError(
            f"add_lora: y must be [{tokens}, {outputs}], adjacent elements a row, and b in one piece, of the "
            "dtype of x"
        )
    if tokens == 0:
        return y
    blocks, size = adapters.rows.shape
    processors = multiprocessors(x)
    splits = lora_splits(blocks, inputs, processors)
    shrunk = grouped_linear_triton(x, a, adapters, splits=splits)
    ends = [sum(sizes[: part + 1]) for part in range(3)]
    lora_expand_kernel[(blocks, triton.cdiv(max(sizes), _COLUMNS), len(sizes))](
        shrunk, b, adapters.rows, adapters.owners, y, tokens, ends[0], ends[1], ends[2], y.stride(0), outputs,
        RANK=rank, RANK_BLOCK=max(16, triton.next_power_of_2(rank)), PARTS=len(sizes), SPLITS=splits,
        ROWS=size, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return y


def lora_splits(blocks: int, inputs: int, processors: int) -> int:
    """Parts of the inputs that give every multiprocessor a program; a power of two."""
    wanted = min(processors // max(blocks, 1), inputs // _LEAST_INPUTS, MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


@triton.jit(do_not_specialize=["tokens"])
def lora_expand_kernel(
    shrunk_ptr, b_ptr, rows_ptr, owners_ptr, y_ptr, tokens, end_0, end_1, end_2, y_stride, outputs,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(2)
    owner = tl.load(owners_ptr + block).to(tl.int64)
    begin = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1)) + tl.program_id(1) * COLUMNS
    end = tl.where(part == 0, end_0, tl.where(part == 1, end_1, end_2))
    if (owner < 0) | (begin >= end):
        return
    row = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = begin + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK_BLOCK)
    there, in_columns, in_rank = row < tokens, column < end, rank < RANK
    shrunk = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
    given = shrunk_ptr + row[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
    for _ in tl.static_range(SPLITS):
        shrunk += tl.load(given, mask=there[:, None] & in_rank[None, :], other=0.0).to(tl.float32)
        given += tokens * (PARTS * RANK)
    b_at = b_ptr + (owner * outputs + column)[None, :] * RANK + rank[:, None]
    b = tl.load(b_at, mask=in_columns[None, :] & in_rank[:, None], other=0.0)
    added = tl.dot(shrunk.to(b.dtype), b, input_precision="ieee")
    place = y_ptr + row[:, None] * y_stride + column[None, :]
    inside = there[:, None] & in_columns[None, :]
    y = tl.load(place, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=inside)


def _expansion(rank: int, parts: int, rows: int, splits: int, *, min_blocks: int = 2) -> LaunchConfig:
    return LaunchConfig(
        f"lora, expanded from {rank}, {parts} parts: {rows} rows",
        lora_expand_kernel,
        {
            "shrunk_ptr": "*fp32" if splits > 1 else "*bf16", "b_ptr": "*bf16", "rows_ptr": "*i32",
            "owners_ptr": "*i32", "y_ptr": "*bf16", "tokens": "i32", "end_0": "i32", "end_1": "i32",
            "end_2": "i32", "y_stride": "i32", "outputs": "i32",
        },
        {
            "RANK": rank, "RANK_BLOCK": max(16, triton.next_power_of_2(rank)), "PARTS": parts,
            "SPLITS": splits, "ROWS": rows, "COLUMNS": _COLUMNS,
        },
        warps=_WARPS,
        aligned=frozenset({"end_0", "end_1", "end_2", "y_stride", "outputs"}),
        expects=("mma", "load128"),
        min_blocks=min_blocks,
    )  # fmt: skip


LAUNCH_CONFIGS = (
    grouped_linear_launch_config("lora, shrunk to 16: 16 rows", 16, 16, split=True),
    grouped_linear_launch_config("lora, shrunk to 3 x 16: 16 rows", 16, 64, split=True),
    grouped_linear_launch_config("lora, shrunk to 3 x 16: 64 rows", 64, 64),
    _expansion(16, 1, 16, 8),
    _expansion(16, 3, 16, 8),
    _expansion(64, 3, 64, 1),
    _expansion(8, 1, 16, 8),
)
