"""Linear layers behind one interface, so that a model does not know how its weights are stored.

A model calls the ``LinearFactory`` that it was given once per matrix; ``Linear`` is the dense implementation.
Weights that are multiplied together (q, k and v; gate and up) are one matrix with several prefixes in the
checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True, eq=False)
class LinearShape:
    """The concatenation of ``prefixes``, which have ``out_sizes`` rows each.

    ``weight`` [out, in], if given, is shared (tied embeddings) and filled by its owner: the layer computes
    with it, must not change it, and has no target for it.
    """

    prefixes: Sequence[str]
    in_size: int
    out_sizes: Sequence[int]
    bias: bool
    dtype: torch.dtype
    device: torch.device
    weight: Tensor | None = None

    def by_prefix(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of tensors with a row for each output, by their names in the checkpoint."""
        return {
            f"{prefix}.{kind}": view
            for kind, tensor in parts.items()
            for prefix, view in zip(self.prefixes, tensor.split(list(self.out_sizes)), strict=True)
        }


LinearFactory = Callable[[LinearShape], LinearLayer]


@dataclass(frozen=True, slots=True)
class LinearMaker:
    """A factory for matrices of one dtype on one device."""

    factory: LinearFactory
    dtype: torch.dtype
    device: torch.device

    def __call__(
        self,
        prefixes: Sequence[str],
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        weight: Tensor | None = None,
    ) -> LinearLayer:
        """The layer of this shape."""
        return self.factory(LinearShape(prefixes, in_size, out_sizes, bias, self.dtype, self.device, weight))


class Linear:
    """y = x W^T + b in the model's dtype, W [sum of the out_sizes, in]; ``targets`` are views of it."""

    forward_fp8: Fp8Forward | None = None

    def __init__(self, shape: LinearShape) -> None:
        empty = partial(torch.empty, sum(shape.out_sizes), dtype=shape.dtype, device=shape.device)
        self._shape, self._is_borrowed = shape, shape.weight is not None
        self.weight = empty(shape.in_size) if shape.weight is None else shape.weight
        self.bias = empty() if shape.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def targets(self) -> dict[str, Tensor]:
        """One view per weight and bias of the checkpoint."""
        parts = {} if self._is_borrowed else {"weight": self.weight}
        if self.bias is not None:
            parts["bias"] = self.bias
        return self._shape.by_prefix(parts)

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
