"""RMS norm, fused with the preceding residual add and, for an FP8 layer, with the following quantisation."""

from typing import Protocol

import torch
from torch import Tensor

from quire_kernels import add_rmsnorm, add_rmsnorm_fp8
from quire_server.layers.linear import Fp8Forward


class Next(Protocol):
    """What follows a norm: a linear layer, or a block that begins with one."""

    @property
    def forward_fp8(self) -> Fp8Forward | None:
        """As in ``LinearLayer``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class RMSNorm:
    """Called with the newest output and the residual stream, which is updated in place.

    ``is_offset``: the checkpoint stores w for a weight of 1 + w, applied in float32 (Gemma).
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
        """Apply ``following`` to the norm. If it multiplies in FP8, one kernel computes the norm and
        quantises it.
        """
        if (forward_fp8 := following.forward_fp8) is None:
            return following(self(x, residual))
        return forward_fp8(*add_rmsnorm_fp8(x, residual, self.weight, self.eps))

    def finish(self) -> None:
        """Called once, when the weight is loaded."""
        if self._is_offset:
            self.weight += 1
