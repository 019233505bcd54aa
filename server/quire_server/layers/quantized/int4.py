"""4-bit matrices of a checkpoint, multiplied on a CPU without dequantising, by the kernel of `Int4Linear`."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire_kernels import int4_linear, repack_int4
from quire_server.layers.int4_linear import ALIGNED
from quire_server.layers.linear import LinearShape
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.stored_linear import Product, StoredLinear, four_bit_parts


def is_int4(weights: WeightFormat) -> bool:
    """Whether a matrix in this format can be multiplied: 4 bits, in groups of 32 or multiples of it, whose
    inputs are in their own order.
    """
    match weights:
        case Packed(bits=4) | AWQ() | GPTQ(has_act_order=False):
            return (weights.group_size or ALIGNED[0]) % ALIGNED[0] == 0
    return False


class StoredInt4(StoredLinear):
    """A LinearLayer whose parts are all stored in a format of ``is_int4``."""

    def __init__(self, weights: WeightFormat, shape: LinearShape) -> None:
        super().__init__(weights, replace(shape, dtype=torch.float32))

    def _convert(self, weights: WeightFormat, stored: Mapping[str, Mapping[str, Tensor]]) -> Product:
        packed = repack_int4(four_bit_parts(weights, stored))
        return Product(lambda x, bias: int4_linear(x, packed, bias), packed.tensors)
