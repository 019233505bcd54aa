"""A byte a weight, and scales: FP8 (e4m3) and int8, as compressed-tensors, AutoFP8 and transformers do it.

W [out, in] = q * s, with one s for all of it, for each row (channel), or for each rectangle (block, group).
Where int8 has zeros, W = (q - z) * s, with a ``weight_zero_point`` of the scale's shape.
Scales of activations are read past: they say how a kernel may round what it multiplies, and this path rounds
nothing.
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
    """``block``: rows and columns that share a scale; None stands for all of them."""

    dtype: torch.dtype
    block: tuple[int | None, int | None]
    scale_name: str = "weight_scale"
    activations: tuple[str, ...] = ()  # one number each, not used
    has_zeros: bool = False
    rounds_inputs: bool = False  # it was made for kernels that round each row of the inputs to int8
    rounds_inputs_to_fp8: bool = False  # the same, to float8

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether kernels that do so can multiply the stored numbers as they are."""
        return self.rounds_inputs_to_fp8 and self.block in ((None, None), (1, None)) and not self.has_zeros

    @property
    def is_w8a8(self) -> bool:
        """Whether such a kernel can multiply the stored numbers as they are."""
        by_row = self.block == (1, None) and not self.has_zeros
        return self.rounds_inputs and by_row and self.dtype == INT8

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """weight, its scale, and those of activations."""
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

    def store(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors that ``dequantize`` reads, of a matrix with a scale for each row and no zeros."""
        return {"weight": rounded.codes.to(self.dtype), self.scale_name: rounded.scales}

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        weight = tensors["weight"].float()
        if self.has_zeros:
            weight -= self._spread(tensors[_ZEROS].float(), weight)
        return weight * self._spread(tensors[self.scale_name], weight)

    def _spread(self, values: Tensor, weight: Tensor) -> Tensor:
        """One value for each element, or what broadcasts to that."""
        for dimension, block in enumerate(self.block):
            if block is not None and block != 1:
                repeated = values.repeat_interleave(block, dimension)
                values = repeated.narrow(dimension, 0, weight.shape[dimension])
        return values
