"""Table lookup by row: token embeddings, or one rank's part of them, and the RoPE angles of positions."""

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


def take_partial_rows(table: Tensor, index: Tensor, first: int) -> Tensor:
    """As ``take_rows`` if the table had ``first`` rows before those it has. Rows that it lacks are zeros."""
    if NATIVE is not None and table.device.type == "cpu" and table.is_contiguous():
        return NATIVE.take_rows(table, index, first)
    return take_partial_rows_reference(table, index, first)


def take_partial_rows_reference(table: Tensor, index: Tensor, first: int) -> Tensor:
    """The same by torch."""
    rows = index - first
    is_there = (rows >= 0) & (rows < table.shape[0])
    return functional.embedding(rows.where(is_there, 0), table).where(is_there[:, None], 0)
