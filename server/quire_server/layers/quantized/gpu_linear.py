"""Quantised matrices of a checkpoint (4-bit, FP8, int8), multiplied by a GPU's kernels without dequantising:
fewer bytes to read per token.

4-bit weights take inputs in bfloat16. FP8 and int8 weights take inputs of their own type, quantised row by
row, as the checkpoint's author specified.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_kernels import W4Weight, fp8_linear, fp8_product, w4a16, w8a8
from quire_kernels.quantization.fp8_linear import ALIGNED as FP8_ALIGNED
from quire_kernels.quantization.w4a16_packing import GROUPS
from quire_kernels.quantization.w8a8 import ALIGNED as INT8_ALIGNED
from quire_server.layers.linear import Fp8Forward, LinearShape
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.scaled_8bit import FP8, Scaled
from quire_server.layers.quantized.stored_linear import Product, StoredLinear, four_bit_parts


def can_multiply(weights: WeightFormat, shape: LinearShape) -> bool:
    """Whether there is a kernel for this format and size. ``runner.quantization`` checks that the GPU has the
    type.
    """
    if shape.dtype != torch.bfloat16:
        return False
    if isinstance(weights, Scaled):
        takes_inputs = weights.rounds_to_fp8 if weights.dtype == FP8 else weights.is_w8a8
        aligned = FP8_ALIGNED if weights.dtype == FP8 else INT8_ALIGNED
        return takes_inputs and all(size % aligned == 0 for size in (shape.in_size, *shape.out_sizes))
    if isinstance(weights, Packed) and weights.bits != 4:
        return False
    if not isinstance(weights, AWQ | GPTQ | Packed):
        return False
    return (weights.group_size or shape.in_size) % GROUPS[-1] == 0


class QuantizedGpuLinear(StoredLinear):
    """A LinearLayer whose parts are all stored in one format that ``can_multiply``."""

    def __init__(self, weights: WeightFormat, shape: LinearShape) -> None:
        super().__init__(weights, shape)
        is_fp8 = isinstance(weights, Scaled) and weights.dtype == FP8
        self.forward_fp8: Fp8Forward | None = self._forward_fp8 if is_fp8 else None

    def _forward_fp8(self, values: Tensor, scales: Tensor) -> Tensor:
        assert self._product is not None and self._product.forward_fp8 is not None, "finish() comes first"
        return self._product.forward_fp8(values, scales, self._bias)

    def _convert(self, weights: WeightFormat, stored: Mapping[str, Mapping[str, Tensor]]) -> Product:
        return _one_byte(weights, stored) if isinstance(weights, Scaled) else _four_bits(weights, stored)


def _one_byte(weights: Scaled, stored: Mapping[str, Mapping[str, Tensor]]) -> Product:
    """One matrix with a scale per row."""
    parts = [tensors["weight"] for tensors in stored.values()]
    scales = [
        tensors[weights.scale_name].flatten().expand(len(tensors["weight"])) for tensors in stored.values()
    ]
    weight, all_scales = torch.cat(parts), torch.cat(scales).contiguous()
    tensors = (weight, all_scales)
    if weights.dtype != FP8:
        return Product(lambda x, bias: w8a8(x, *tensors, bias), tensors)

    def forward_fp8(values: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_product((values, row_scales), *tensors, bias, torch.bfloat16)

    return Product(lambda x, bias: fp8_linear(x, *tensors, bias), tensors, forward_fp8)


def _four_bits(weights: WeightFormat, stored: Mapping[str, Mapping[str, Tensor]]) -> Product:
    """One matrix, unless the parts have different orders of inputs."""
    parts = [_narrowed(part) for part in four_bit_parts(weights, stored)]
    if all(part.order is None for part in parts):
        merged = W4Weight(
            torch.cat([part.packed for part in parts], 1),
            torch.cat([part.scales for part in parts], 1),
            torch.cat([part.zeros for part in parts], 1),
            parts[0].group,
        )
        return Product(lambda x, bias: w4a16(x, merged, bias), _tensors(merged))

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        sizes = [part.shape[1] for part in parts]
        out = torch.empty(len(x), sum(sizes), dtype=x.dtype, device=x.device)
        biases = [None] * len(parts) if bias is None else bias.split(sizes)
        for part, its_bias, its_out in zip(parts, biases, out.split(sizes, 1), strict=True):
            w4a16(x, part, its_bias, out=its_out)
        return out

    return Product(product, tuple(tensor for part in parts for tensor in _tensors(part)))


def _tensors(weight: W4Weight) -> tuple[Tensor, ...]:
    """The tensors of the kernel's form."""
    order = () if weight.order is None else (weight.order,)
    return (weight.packed, weight.scales, weight.zeros, *order)


def _narrowed(weight: W4Weight) -> W4Weight:
    """Scales as float16 where that loses nothing: fewer bytes per token."""
    scales = weight.scales.half()
    if not torch.equal(scales.float(), weight.scales.float()):
        return weight
    return W4Weight(weight.packed, scales, weight.zeros, weight.group, weight.order)
