"""Linear layers with fused weights: q, k and v are one matrix, gate and up another. Called by the models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x W^T + b, W [sum of parts, in]; ``parts`` are views of it, one per weight of the checkpoint."""

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        out_size = sum(out_sizes)
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._out_sizes = list(out_sizes)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def targets(self, prefixes: Sequence[str]) -> dict[str, Tensor]:
        """Where the checkpoint's tensors go: name -> view."""
        names = dict(zip((f"{p}.weight" for p in prefixes), self.weight.split(self._out_sizes), strict=True))
        if self.bias is not None:
            names |= zip((f"{p}.bias" for p in prefixes), self.bias.split(self._out_sizes), strict=True)
        return names
