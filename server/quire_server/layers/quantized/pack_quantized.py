"""The "pack-quantized" format of compressed-tensors: 4 or 8 bit integers in 32 bit words.

W [out, in] = (u - z) * s[:, k // group_size], or s [out, 1] for whole rows; z is 2^(bits - 1), or stored.

* ``weight_packed`` i32 [out, in * bits / 32]: u along the inputs, the first in the lowest bits.
* ``weight_scale`` float [out, groups]; ``weight_shape`` i64 [2]: out, in.
* ``weight_zero_point`` i32 [out * bits / 32, groups], where zeros are stored: z along the outputs, like u.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels import W4Weight, repack_packed
from quire_server.errors import ModelCorruptError
from quire_server.layers.quantized.format import REMEDY, Rounded, TensorSpec, divide, pack, unpack


@dataclass(frozen=True, slots=True)
class Packed:
    """``group_size`` None: one scale per row."""

    bits: int
    group_size: int | None
    has_zeros: bool = False

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """weight_packed, weight_scale, weight_shape and, where zeros are stored, weight_zero_point."""
        words = divide(name, "inputs", in_size * self.bits, 32)
        groups = divide(name, "inputs", in_size, self.group_size or in_size)
        specs = {
            "weight_packed": TensorSpec((out_size, words), torch.int32),
            "weight_scale": TensorSpec((out_size, groups), torch.float32),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if self.has_zeros:
            rows = -(-out_size * self.bits // 32)
            specs["weight_zero_point"] = TensorSpec((rows, groups), torch.int32)
        return specs

    @property
    def granularity(self) -> tuple[int, int | None]:
        """A word holds several inputs, or the zeros of several outputs."""
        each = 32 // self.bits
        return each if self.has_zeros else 1, math.lcm(each, self.group_size or 1)

    def store(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors that ``dequantize`` reads; codes and zeros are from 0 to 2^bits - 1."""
        stored = {
            "weight_packed": pack(rounded.codes, self.bits),
            "weight_scale": rounded.scales,
            "weight_shape": torch.tensor(rounded.codes.shape),
        }
        if rounded.zeros is not None:
            stored["weight_zero_point"] = pack(rounded.zeros.T, self.bits).T
        return stored

    def four_bits(self, name: str, tensors: Mapping[str, Tensor]) -> W4Weight:
        """The kernel's form of the matrix, for ``bits`` 4."""
        self._check(name, tensors)
        zeros = tensors["weight_zero_point"] if self.has_zeros else None
        return repack_packed(tensors["weight_packed"], tensors["weight_scale"], zeros)

    def _check(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        rows, words = tensors["weight_packed"].shape
        wanted = [rows, words * 32 // self.bits]
        shape = tensors["weight_shape"].tolist()  # of the whole matrix, of which this may be a shard
        if any(size < 1 or size % own for size, own in zip(shape, wanted, strict=True)):
            raise ModelCorruptError(
                f"{name}.weight_shape says {shape}; config.json asks for {wanted}. {REMEDY}"
            )

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in]."""
        self._check(name, tensors)
        scale = tensors["weight_scale"]
        quantized = unpack(tensors["weight_packed"], self.bits)
        zeros = torch.full_like(scale, 1 << (self.bits - 1), dtype=torch.int32)
        if self.has_zeros:
            zeros = unpack(tensors["weight_zero_point"].T, self.bits).T[: len(scale)]
        centred = quantized.view(*scale.shape, -1) - zeros[:, :, None]
        return (centred.float() * scale[:, :, None]).flatten(1)
