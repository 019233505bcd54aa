"""Linear layers behind one interface, so that a model does not know how its weights are stored.

A model calls the ``LinearFactory`` that it was given once per matrix; ``Linear`` is the dense implementation.
Weights that are multiplied together (q, k and v; gate and up) are one matrix with several prefixes in the
checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

#: The product of rows quantised to FP8: (e4m3 [T, in], scale of each row f32 [T, 1]) -> [T, out].
Fp8Forward = Callable[[Tensor, Tensor], Tensor]


class Weights(Protocol):
    """Tensors that are filled from a checkpoint."""

    def targets(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> the tensor or view to fill, in the file's shape."""

    def finish(self) -> None:
        """Called once after all targets are filled and before the first call, to repack the weights if
        needed.
        """

    def weights(self) -> Sequence[Tensor]:
        """The tensors that are computed with. Before ``finish``, tensors of about the same size."""


class LinearLayer(Weights, Protocol):
    """A linear layer as a model uses it."""

    @property
    def forward_fp8(self) -> Fp8Forward | None:
        """The product of FP8 rows, if the layer multiplies in FP8: the preceding norm or activation then
        quantises the rows itself. None otherwise.
        """

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the out_sizes]."""


class LinearFactory(Protocol):
    """Makes the layer for the concatenation of ``prefixes``, which have ``out_sizes`` rows each.

    ``weight`` [out, in], if given, is shared (tied embeddings) and filled by its owner: the layer computes
    with it, must not change it, and has no target for it.
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
    """y = x W^T + b in the model's dtype, W [sum of the out_sizes, in]; ``targets`` are views of it."""

    forward_fp8: Fp8Forward | None = None

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
        """Nothing to do: the weights are used as they were loaded."""

    def weights(self) -> Sequence[Tensor]:
        """The matrix, unless it is shared, and the bias."""
        own = () if self._is_borrowed else (self.weight,)
        return own if self.bias is None else (*own, self.bias)


class GpuLinear(Linear):
    """A dense layer on a GPU. ``layers.quantized`` uses GPU kernels for quantised weights beside this
    factory.
    """
