"""Table lookup by row: token embeddings, and the RoPE angles of positions."""

from torch import Tensor
from torch.nn import functional

from quire_kernels.cpu.native import NATIVE


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """table [N, D] at index i64 [T] -> [T, D]; every index is below N."""
    if NATIVE is not None and table.device.type == "cpu" and table.is_contiguous():
        return NATIVE.take_rows(table, index)
    return take_rows_reference(table, index)


def take_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """The same by torch, which also checks the index."""
    return functional.embedding(index, table)
