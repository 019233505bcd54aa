"""Tensors that are parts of wider ones, as a model's are: what a kernel reads, and where it writes."""

import torch
from torch import Tensor


def rows(count: int, size: int, dtype: torch.dtype, apart: int, device: str) -> Tensor:
    """[count, size] of random numbers, with as many others before each row."""
    return torch.randn(count, size + apart, device=device).mul_(3).to(dtype)[:, apart:]


def place_for(like: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Nines, one more than ``like`` has in ``dim``; and the part of them that is to be written."""
    shape = list(like.shape)
    shape[dim] += 1
    whole = torch.full(shape, 9.0, dtype=like.dtype, device=like.device)
    return whole, whole.narrow(dim, 0, like.shape[dim])


def is_kept(whole: Tensor, dim: int = -1) -> bool:
    """Whether nothing was written around the part."""
    return bool((whole.select(dim, -1) == 9).all())
