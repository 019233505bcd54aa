"""Linear layers loaded dense and kept as int8: a ``LinearFactory``, chosen by ``runner.quantization``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import NATIVE, Int8Weight, int8_linear, quantise_int8
from quire_server.layers.linear import Linear

__all__ = ["Int8Linear", "has_native_kernels", "tensors_of"]


def tensors_of(weight: Int8Weight, bias: Tensor | None) -> Sequence[Tensor]:
    """What a product with it reads."""
    return (weight.packed, weight.scales) if bias is None else (weight.packed, weight.scales, bias)


def has_native_kernels() -> bool:
    """Whether the CPU kernels were built and the CPU can run them."""
    return NATIVE is not None


class Int8Linear(Linear):
    """y = x W^T + b; W has a scale for each output, x one for each 64 numbers of a row, found on the way."""

    _quantised: Int8Weight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._quantised is not None, "finish() comes before the first call"
        return int8_linear(x, self._quantised, self.bias)

    def finish(self) -> None:
        """Quantise, and give the dense matrix back."""
        self._quantised = quantise_int8(self.weight)
        self.weight = torch.empty(0)
        self.bias = None if self.bias is None else self.bias.float()

    def weights(self) -> Sequence[Tensor]:
        """As packed, once it is."""
        if self._quantised is None:
            return super().weights()
        return tensors_of(self._quantised, self.bias)
