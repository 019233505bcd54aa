"""Linear layers behind one seam, so that a model never knows how its weights are stored.

Models call the ``LinearFactory`` that they were given, once per matrix; ``Linear`` is the dense one. Weights
that the arithmetic wants side by side (q, k and v; gate and up) are one matrix with several prefixes in the
checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

#: Of rows rounded to float8, e4m3 [T, in], and the scale of each, f32 [T, 1]: [T, out].
OfRounded = Callable[[Tensor, Tensor], Tensor]


class Weights(Protocol):
    """What is filled from a checkpoint."""

    def targets(self) -> dict[str, Tensor]:
        """The checkpoint's name -> the tensor to fill, or a view of one; shapes are those of the file."""

    def finish(self) -> None:
        """Called once, after all targets are filled and before the first call: to repack, or nothing."""

    def weights(self) -> Sequence[Tensor]:
        """What it computes with. Before ``finish``, tensors of nearly as many bytes."""


class LinearLayer(Weights, Protocol):
    """What a model may do with a linear layer."""

    @property
    def of_rounded(self) -> OfRounded | None:
        """The same, where it multiplies in float8: whoever makes the rows rounds them on the way then."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the parts]."""


class LinearFactory(Protocol):
    """Makes the layer that stands for the concatenation of ``prefixes``, each with its ``out_sizes`` rows.

    ``weight`` [out, in], where given, belongs to somebody else (tied embeddings) who fills it: the layer
    computes with it, must not change it, and has no target for it.
    """

    def __call__(
        self,
        prefixes: Sequence[str],
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ) -> LinearLayer: ...


class Linear:
    """y = x W^T + b in the model's dtype, W [sum of parts, in]; ``targets`` are views of it."""

    of_rounded: OfRounded | None = None

    def __init__(
        self,
        prefixes: Sequence[str],
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ) -> None:
        out_size = sum(out_sizes)
        self._prefixes, self._out_sizes = list(prefixes), list(out_sizes)
        self._is_borrowed = weight is not None
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device) if weight is None else weight
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def targets(self) -> dict[str, Tensor]:
        """One view per weight and bias of the checkpoint."""
        parts = {} if self._is_borrowed else {"weight": self.weight}
        if self.bias is not None:
            parts["bias"] = self.bias
        return {
            f"{prefix}.{kind}": view
            for kind, tensor in parts.items()
            for prefix, view in zip(self._prefixes, tensor.split(self._out_sizes), strict=True)
        }

    def finish(self) -> None:
        """Nothing: the weights are used as they were loaded."""

    def weights(self) -> Sequence[Tensor]:
        """The matrix, unless it is borrowed, and the bias."""
        own = () if self._is_borrowed else (self.weight,)
        return own if self.bias is None else (*own, self.bias)
