"""Triton kernels of `group_rows`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

Both have one program per owner: the first counts its rows, the second writes them after those of the owners
before it. No sort, and no atomics whose order would matter.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig
from quire_kernels.moe.row_groups import RowGroups, empty_groups

# Two sizes, because each is compiled: a decode step has few rows, a prompt many.
_FEW, _BLOCK, _WARPS = 256, 4096, 8


def group_rows_triton(of: Tensor, num_owners: int, size: int) -> RowGroups:
    """As ``group_rows``."""
    if of.dtype != torch.int32 or not of.is_contiguous() or of.dim() != 1:
        raise ValueError("group_rows: of must be int32 [n], in one piece")
    rows, owners = empty_groups(of, num_owners, size)
    count = of.shape[0]
    if count == 0:
        return RowGroups(of, rows, owners)
    counts = torch.empty(num_owners, dtype=torch.int32, device=of.device)
    block = _FEW if count <= _FEW else _BLOCK
    owned_kernel[(num_owners,)](of, counts, count, BLOCK=block, num_warps=_WARPS)
    group_rows_kernel[(num_owners + 1,)](
        of, counts, rows, owners, count, num_owners, owners.shape[0], SIZE=size, BLOCK=block,
        OWNERS_BLOCK=triton.next_power_of_2(num_owners), num_warps=_WARPS,
    )  # fmt: skip
    return RowGroups(of, rows, owners)


@triton.jit(do_not_specialize=["count"])
def owned_kernel(of_ptr, counts_ptr, count, BLOCK: tl.constexpr):
    owner, at = tl.program_id(0), tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    # Whole blocks without a mask: whether the count is a multiple of a wide load is not known.
    whole = count // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        found += (tl.load(of_ptr + first + at) == owner).to(tl.int32)
    found += (tl.load(of_ptr + whole + at, mask=whole + at < count, other=-1) == owner).to(tl.int32)
    tl.store(counts_ptr + owner, tl.sum(found, 0))


@triton.jit(do_not_specialize=["count", "blocks"])
def group_rows_kernel(
    of_ptr, counts_ptr, rows_ptr, owners_ptr, count, num_owners, blocks,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OWNERS_BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0)
    each = tl.arange(0, OWNERS_BLOCK)
    owned = tl.load(counts_ptr + each, mask=each < num_owners, other=0)
    first_block = tl.sum(tl.where(each < owner, (owned + SIZE - 1) // SIZE, 0), 0)
    own_blocks = tl.sum(tl.where(each == owner, (owned + SIZE - 1) // SIZE, 0), 0)
    # The program after the last owner's marks the unused blocks with -1.
    is_last = owner == num_owners
    end_block = tl.where(is_last, blocks, first_block + own_blocks)
    whose = tl.where(is_last, -1, owner)
    at = tl.arange(0, BLOCK)
    for block in range(first_block, end_block, BLOCK):
        tl.store(owners_ptr + block + at, tl.zeros([BLOCK], tl.int32) + whose, mask=block + at < end_block)
    place = first_block * SIZE
    whole = count // BLOCK * BLOCK
    for first in range(0, tl.where(is_last, 0, whole), BLOCK):
        place = _place(rows_ptr, place, first + at, tl.load(of_ptr + first + at) == owner)
    of = tl.load(of_ptr + whole + at, mask=(whole + at < count) & (is_last == 0), other=-1)
    place = _place(rows_ptr, place, whole + at, (of == owner) & (is_last == 0))
    rest = place + tl.arange(0, SIZE)
    none = tl.zeros([SIZE], tl.int32) + count
    tl.store(rows_ptr + rest, none, mask=(rest < end_block * SIZE) & (is_last == 0))


@triton.jit
def _place(rows_ptr, place, row, is_own):
    """Write the owner's rows from ``place`` on; returns the place behind them."""
    one = is_own.to(tl.int32)
    tl.store(rows_ptr + place + tl.cumsum(one, 0) - one, row, mask=is_own)
    return place + tl.sum(one, 0)


LAUNCH_CONFIGS = (
    LaunchConfig(
        "group_rows, counted",
        owned_kernel,
        {"of_ptr": "*i32", "counts_ptr": "*i32", "count": "i32"},
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        expects=("load128",),
    ),
    LaunchConfig(
        "group_rows of 128 owners, blocks of 16",
        group_rows_kernel,
        {
            "of_ptr": "*i32", "counts_ptr": "*i32", "rows_ptr": "*i32", "owners_ptr": "*i32", "count": "i32",
            "num_owners": "i32", "blocks": "i32",
        },
        {"SIZE": 16, "BLOCK": _BLOCK, "OWNERS_BLOCK": 128},
        warps=_WARPS,
        expects=("load128",),
    ),
)  # fmt: skip
