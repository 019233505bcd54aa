"""Groups rows by owner, tokens by expert or by LoRA adapter, into blocks that each have one owner.

A grouped matrix product (`grouped_linear_triton`) is launched over these blocks.
"""

import torch
from torch import Tensor

from quire_kernels.moe.row_groups import RowGroups, empty_groups

if torch.cuda.is_available():
    from quire_kernels.moe.group_rows_triton import group_rows_triton


def group_rows(of: Tensor, num_owners: int, size: int) -> RowGroups:
    """``of`` i32 [n]: each row's owner, 0 to ``num_owners`` - 1; -1: left out. ``size``: rows per block."""
    if of.is_cuda:
        return group_rows_triton(of, num_owners, size)
    return group_rows_reference(of, num_owners, size)


def group_rows_reference(of: Tensor, num_owners: int, size: int) -> RowGroups:
    """One owner at a time."""
    rows, owners = empty_groups(of, num_owners, size)
    rows.fill_(of.shape[0])
    owners.fill_(-1)
    first = 0
    for owner in range(num_owners):
        own = (of == owner).nonzero()[:, 0]
        blocks = -(-own.shape[0] // size)
        rows[first : first + blocks].view(-1)[: own.shape[0]] = own
        owners[first : first + blocks] = owner
        first += blocks
    return RowGroups(of, rows, owners)
