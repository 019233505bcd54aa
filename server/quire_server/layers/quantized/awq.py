"""AWQ, 4 bit: the "gemm" format of AutoAWQ (arXiv:2306.00978).

For W [in, out], rows share a scale and a zero: W[k, n] = (q[k, n] - z[g, n]) * s[g, n], g = k // group_size.

* ``qweight`` i32 [in, out / 8]: eight columns a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its low end.
* ``qzeros`` i32 [groups, out / 8], in the same order; ``scales`` float [groups, out].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels import W4Weight, repack_awq
from quire_server.layers.quantized.format import TensorSpec, divide, unpack

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of column j in a word: the inverse of the order above


@dataclass(frozen=True, slots=True)
class AWQ:
    """Zeros are always stored, even by symmetric quantisers. ``group_size`` None: one group."""

    group_size: int | None

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """qweight, qzeros, scales."""
        groups = divide(name, "inputs", in_size, self.group_size or in_size)
        words = divide(name, "outputs", out_size, 8)
        return {
            "qweight": TensorSpec((in_size, words), torch.int32),
            "qzeros": TensorSpec((groups, words), torch.int32),
            "scales": TensorSpec((groups, out_size), torch.float32),
        }

    @property
    def granularity(self) -> tuple[int, int | None]:
        """A word holds eight outputs."""
        return 8, self.group_size or 1

    def four_bits(self, name: str, tensors: Mapping[str, Tensor]) -> W4Weight:
        """The kernel's form of the matrix."""
        return repack_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        quantized = unpack(tensors["qweight"], 4, _ORDER)
        zeros = unpack(tensors["qzeros"], 4, _ORDER)
        grouped = quantized.view(zeros.shape[0], -1, quantized.shape[1])
        weight = (grouped - zeros[:, None]).float() * tensors["scales"][:, None]
        return weight.flatten(0, 1).T
