"""`RowGroups`, the result of `group_rows`, which grouped kernels are launched over."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowGroups:
    """``of`` i32 [n]: each row's owner. ``rows`` i32 [blocks, size]: the rows of each block, in order, padded
    with n. ``owners`` i32 [blocks]: each block's owner; -1 for unused blocks at the end, whose ``rows`` are
    undefined. The number of blocks depends on shapes alone, so a captured CUDA graph stays valid.
    """

    of: Tensor
    rows: Tensor
    owners: Tensor


def empty_groups(of: Tensor, num_owners: int, size: int) -> tuple[Tensor, Tensor]:
    """(rows, owners), uninitialized, for the largest possible number of blocks."""
    count = of.shape[0]
    blocks = min(count, (count + num_owners * (size - 1)) // size)
    rows = torch.empty(blocks, size, dtype=torch.int32, device=of.device)
    return rows, torch.empty(blocks, dtype=torch.int32, device=of.device)
