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
from quire_server.layers.linear import Fp8Forward
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import REMEDY, WeightFormat
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

    def __init__(
        self,
        weights: WeightFormat,
        prefixes: Sequence[str],
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights, self._prefixes, self._out_sizes = weights, list(prefixes), list(out_sizes)
        self._stored = {
            prefix: {
                suffix: torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for suffix, spec in weights.tensors(prefix, in_size, size).items()
            }
            for prefix, size in zip(prefixes, out_sizes, strict=True)
        }
        self._bias = torch.empty(sum(out_sizes), dtype=dtype, device=device) if bias else None

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
        if self._bias is not None:
            parts = self._bias.split(self._out_sizes)
            named |= {f"{prefix}.bias": part for prefix, part in zip(self._prefixes, parts, strict=True)}
        return named

    def finish(self) -> None:
        """Convert to the kernel's form, and free what was read."""
        for prefix, tensors in self._stored.items():
            for suffix, tensor in tensors.items():
                if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
                    raise ModelCorruptError(
                        f"{prefix}.{suffix} holds values that are not finite numbers. {REMEDY}"
                    )
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
