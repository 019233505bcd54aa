"""One byte per weight, with scales: FP8 (e4m3) and int8, as written by compressed-tensors, AutoFP8 and
transformers.

W [out, in] = q * s, with one s for the whole matrix, for each row (channel), or for each rectangle (block,
group). If int8 has zeros, W = (q - z) * s, with a ``weight_zero_point`` of the scale's shape. Scales of
activations are read and ignored: they allow a kernel to quantise its inputs, which dequantising does not do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded, TensorSpec

FP8, INT8 = torch.float8_e4m3fn, torch.int8
_ZEROS = "weight_zero_point"


@dataclass(frozen=True, slots=True)
class Scaled:
    """``block``: rows and columns that share a scale; None means all of them."""

    dtype: torch.dtype
    block: tuple[int | None, int | None]
    scale_name: str = "weight_scale"
    activations: tuple[str, ...] = ()  # suffixes of one number each, ignored
    has_zeros: bool = False
    rounds_inputs: bool = False  # made for kernels that quantise each input row to int8
    rounds_inputs_to_fp8: bool = False  # the same, to FP8

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether kernels that quantise inputs to FP8 can multiply the stored numbers."""
        return self.rounds_inputs_to_fp8 and self.block in ((None, None), (1, None)) and not self.has_zeros

    @property
    def is_w8a8(self) -> bool:
        """Whether kernels that quantise inputs to int8 can multiply the stored numbers."""
        by_row = self.block == (1, None) and not self.has_zeros
        return self.rounds_inputs and by_row and self.dtype == INT8

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """weight, its scale, zeros, and the scales of activations."""
        row_block, column_block = self.block
        rows = -(-out_size // (row_block or out_size))
        columns = -(-in_size // (column_block or in_size))
        specs = {
            "weight": TensorSpec((out_size, in_size), self.dtype),
            self.scale_name: TensorSpec((rows, columns), torch.float32),
        } | {suffix: TensorSpec((), torch.float32) for suffix in self.activations}
        if self.has_zeros:
            specs[_ZEROS] = TensorSpec((rows, columns), self.dtype)
        return specs

    @property
    def granularity(self) -> tuple[int, int | None]:
        """Whole blocks."""
        rows, columns = self.block
        return rows or 1, columns or 1

    def store(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors that ``dequantize`` reads, for a matrix with a scale per row and no zeros."""
        return {"weight": rounded.codes.to(self.dtype), self.scale_name: rounded.scales}

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        weight = tensors["weight"].float()
        if self.has_zeros:
            weight -= self._spread(tensors[_ZEROS].float(), weight)
        return weight * self._spread(tensors[self.scale_name], weight)

    def _spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """Values repeated for each element, or in a shape that broadcasts to that."""
        for dimension, block in enumerate(self.block):
            if block is not None and block != 1:
                repeated = values.repeat_interleave(block, dimension)
                values = repeated.narrow(dimension, 0, weight.shape[dimension])
        return values
