"""RMS norm with the residual add in front of it. Called by the models."""

import torch
from torch import Tensor

from quire_kernels import add_rmsnorm


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

    def finish(self) -> None:
        """Called once, when the weight is loaded."""
        if self._is_offset:
            self.weight += 1
