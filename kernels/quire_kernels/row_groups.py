"""What `group_rows` makes, apart from how, for the kernels that are launched over it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowGroups:
    """``of`` i32 [n]: whose each row is. ``rows`` i32 [blocks, size]: the rows of each block, in their order,
    n where there is none. ``owners`` i32 [blocks]: whose block it is; -1 behind the last one, where ``rows``
    is undefined. How many blocks there are depends on shapes alone: a captured graph stays right.
    """

    of: Tensor
    rows: Tensor
    owners: Tensor


def empty_groups(of: Tensor, num_owners: int, size: int) -> tuple[Tensor, Tensor]:
    """(rows, owners), nothing in them, for as many blocks as there may be."""
    count = of.shape[0]
    blocks = min(count, (count + num_owners * (size - 1)) // size)
    rows = torch.empty(blocks, size, dtype=torch.int32, device=of.device)
    return rows, torch.empty(blocks, dtype=torch.int32, device=of.device)
