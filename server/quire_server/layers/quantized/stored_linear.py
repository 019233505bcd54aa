"""A linear layer that computes with the numbers that a checkpoint stores, in a kernel's order, without
dequantising.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_kernels import W4Weight
from quire_server.errors import ModelCorruptError
from quire_server.layers.linear import Fp8Forward, LinearShape
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import REMEDY, WeightFormat, empty_tensors, refuse_not_finite
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.pack_quantized import Packed


class Product(NamedTuple):
    """The function (inputs, bias) -> outputs, and the tensors that it reads."""

    of: Callable[[Tensor, Tensor | None], Tensor]
    weights: tuple[Tensor, ...]
    forward_fp8: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None


class StoredLinear(ABC):
    """A LinearLayer whose parts are all stored in one format. ``dtype``: of the bias."""

    forward_fp8: Fp8Forward | None = None
    _product: Product | None = None

    def __init__(self, weights: WeightFormat, shape: LinearShape) -> None:
        self._weights, self._shape = weights, shape
        self._stored = {prefix: empty_tensors(prefix, weights, shape) for prefix in shape.prefixes}
        size = sum(shape.out_sizes)
        self._bias = torch.empty(size, dtype=shape.dtype, device=shape.device) if shape.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._product is not None, "finish() comes before the first call"
        return self._product.of(x, self._bias)

    def targets(self) -> dict[str, Tensor]:
        """The tensors in the checkpoint's own shapes and types."""
        named = {
            f"{prefix}.{suffix}": tensor
            for prefix, tensors in self._stored.items()
            for suffix, tensor in tensors.items()
        }
        return named if self._bias is None else named | self._shape.by_prefix({"bias": self._bias})

    def finish(self) -> None:
        """Convert to the kernel's form, and free what was read."""
        for prefix, tensors in self._stored.items():
            for suffix, tensor in tensors.items():
                refuse_not_finite(f"{prefix}.{suffix}", tensor)
        self._product = self._convert(self._weights, self._stored)
        self._stored = {}

    def weights(self) -> Sequence[Tensor]:
        """In the kernel's form, once it exists."""
        bias = () if self._bias is None else (self._bias,)
        if self._product is not None:
            return *self._product.weights, *bias
        return *(tensor for tensors in self._stored.values() for tensor in tensors.values()), *bias

    @abstractmethod
    def _convert(self, weights: WeightFormat, stored: Mapping[str, Mapping[str, Tensor]]) -> Product:
        """The product with what was read: tensors by prefix and suffix."""


def four_bit_parts(weights: WeightFormat, stored: Mapping[str, Mapping[str, Tensor]]) -> list[W4Weight]:
    """The matrices, which are stored in 4 bits."""
    assert isinstance(weights, AWQ | GPTQ | Packed)
    parts = []
    for prefix, tensors in stored.items():
        try:
            parts.append(weights.four_bits(prefix, tensors))
        except ValueError as error:
            raise ModelCorruptError(f"{prefix}: {error}. {REMEDY}") from None
    return parts
