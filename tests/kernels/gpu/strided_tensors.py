"""Inputs and outputs that are slices of wider tensors, as in a model."""

import torch
from torch import Tensor


def rows(count: int, size: int, dtype: torch.dtype, apart: int, device: str) -> Tensor:
    """[count, size] random numbers, a slice of a tensor with ``apart`` more per row."""
    return torch.randn(count, size + apart, device=device).mul_(3).to(dtype)[:, apart:]


def output_in_wider_tensor(like: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """A tensor of nines, one larger than ``like`` in ``dim``, and its slice that the kernel writes."""
    shape = list(like.shape)
    shape[dim] += 1
    whole = torch.full(shape, 9.0, dtype=like.dtype, device=like.device)
    return whole, whole.narrow(dim, 0, like.shape[dim])


def is_surrounding_untouched(whole: Tensor, dim: int = -1) -> bool:
    """Whether nothing was written outside of the slice."""
    return bool((whole.select(dim, -1) == 9).all())
