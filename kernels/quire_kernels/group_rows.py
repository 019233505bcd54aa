"""Rows sorted by whose they are, in blocks that each have one owner: what a product of several matrices with
some rows each is launched over. Called by `moe` (tokens by expert) and by whoever serves adapters (tokens by
adapter), once a step.
"""

import torch
from torch import Tensor

from quire_kernels.row_groups import RowGroups, empty_groups

if torch.cuda.is_available():
    from quire_kernels.group_rows_triton import group_rows_triton


def group_rows(of: Tensor, num_owners: int, size: int) -> RowGroups:
    """``of`` i32 [n], below ``num_owners``, or -1: a row of nobody, left out. Blocks have ``size`` rows."""
    if of.is_cuda:
        return group_rows_triton(of, num_owners, size)
    return group_rows_reference(of, num_owners, size)


def group_rows_reference(of: Tensor, num_owners: int, size: int) -> RowGroups:
    """One owner after the other."""
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
