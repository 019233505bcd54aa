"""RMS norm with the residual add in front of it, and rounding to float8 behind it. Called by the models."""

from typing import Protocol

import torch
from torch import Tensor

from quire_kernels import add_rmsnorm, add_rmsnorm_fp8
from quire_server.layers.linear import OfRounded


class Next(Protocol):
    """What a norm is for: a linear layer, or what begins with one."""

    @property
    def of_rounded(self) -> OfRounded | None:
        """As that of a linear layer."""

    def __call__(self, x: Tensor) -> Tensor: ...


class RMSNorm:
    """Call it with the newest output and the residual stream; the stream is updated in place.

    ``is_offset``: the checkpoint holds w and means 1 + w, in float32 (Gemma).
    """

    def __init__(
        self, size: int, eps: float, *, is_offset: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(size, dtype=torch.float32 if is_offset else dtype, device=device)
        self.eps = eps
        self._is_offset = is_offset

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return add_rmsnorm(x, residual, self.weight, self.eps)

    def into(self, following: Next, x: Tensor, residual: Tensor | None) -> Tensor:
        """What follows, of the norm: one kernel makes the float8 rows where it takes such."""
        if (of_rounded := following.of_rounded) is None:
            return following(self(x, residual))
        return of_rounded(*add_rmsnorm_fp8(x, residual, self.weight, self.eps))

    def finish(self) -> None:
        """Called once, when the weight is loaded."""
        if self._is_offset:
            self.weight += 1
