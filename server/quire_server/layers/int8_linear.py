"""Linear layers that are loaded dense and quantised to int8 (a ``LinearFactory``, see
``runner.quantization``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import NATIVE, Int8Weight, int8_linear, quantise_int8
from quire_server.layers.linear import Linear

__all__ = ["Int8Linear", "has_native_kernels", "native_kernels", "tensors_of"]


def tensors_of(weight: Int8Weight, bias: Tensor | None) -> Sequence[Tensor]:
    """The tensors that a product with this weight reads."""
    return (weight.packed, weight.scales) if bias is None else (weight.packed, weight.scales, bias)


def has_native_kernels() -> bool:
    """Whether the CPU kernels are built and this CPU can run them."""
    return NATIVE is not None


def native_kernels() -> str:
    """The instruction set of the CPU kernels that run: avx512_vnni or avx2; none: torch computes."""
    return "none" if NATIVE is None else NATIVE.isa


class Int8Linear(Linear):
    """y = x W^T + b. W has one scale per output; x is quantised on the fly with one scale per 64 numbers of a
    row.
    """

    _quantised: Int8Weight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._quantised is not None, "finish() comes before the first call"
        return int8_linear(x, self._quantised, self.bias)

    def finish(self) -> None:
        """Quantise, and free the dense matrix."""
        self._quantised = quantise_int8(self.weight)
        self.weight = torch.empty(0)
        self.bias = None if self.bias is None else self.bias.float()

    def weights(self) -> Sequence[Tensor]:
        """The packed tensors, once they exist."""
        if self._quantised is None:
            return super().weights()
        return tensors_of(self._quantised, self.bias)
