"""A byte a weight, and scales: FP8 (e4m3) and int8, as compressed-tensors, AutoFP8 and transformers do it.

W [out, in] = q * s, with one s for all of it, for each row (channel), or for each rectangle (block, group).
Scales of activations are read past: they say how a kernel may round what it multiplies, and this path rounds
nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import TensorSpec

FP8, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass(frozen=True, slots=True)
class Scaled:
    """``block``: rows and columns that share a scale; None stands for all of them."""

    dtype: torch.dtype
    block: tuple[int | None, int | None]
    scale_name: str = "weight_scale"
    activations: tuple[str, ...] = ()  # one number each, not used

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """weight, its scale, and those of activations."""
        row_block, column_block = self.block
        rows = -(-out_size // (row_block or out_size))
        columns = -(-in_size // (column_block or in_size))
        return {
            "weight": TensorSpec((out_size, in_size), self.dtype),
            self.scale_name: TensorSpec((rows, columns), torch.float32),
        } | {suffix: TensorSpec((), torch.float32) for suffix in self.activations}

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        weight, scale = tensors["weight"], tensors[self.scale_name]
        for dimension, block in enumerate(self.block):
            if block is not None and block != 1:
                scale = scale.repeat_interleave(block, dimension).narrow(
                    dimension, 0, weight.shape[dimension]
                )
        return weight.float() * scale
