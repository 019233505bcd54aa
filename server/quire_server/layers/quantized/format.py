"""The interface of weight formats, and the packing of small integers into 32-bit words."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quire_server.errors import ModelCorruptError
from quire_server.layers.linear import LinearShape

REMEDY = "Download or quantise the model again."


class TensorSpec(NamedTuple):
    """A tensor of the checkpoint. A float dtype means any float type in the file; other types must match."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Rounded(NamedTuple):
    """A matrix W = (codes - zeros) * scales; a group of columns shares a scale and a zero in each row."""

    codes: Tensor  # [out, in], whole numbers, or e4m3
    scales: Tensor  # f32 [out, groups]
    zeros: Tensor | None = None  # [out, groups], whole numbers


class WeightFormat(Protocol):
    """How one matrix of a linear layer is stored."""

    def tensors(self, name: str, in_size: int, out_size: int) -> dict[str, TensorSpec]:
        """Suffix in the checkpoint -> tensor. Raises ModelCorruptError if the layer's sizes do not fit the
        format.
        """

    @property
    def granularity(self) -> tuple[int, int | None]:
        """(outputs, inputs): a matrix can be divided between multiples of these. Inputs None: not at all."""

    def dequantize(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """f32 [out, in], exact except for the rounding of one float32 product per element.

        Raises ModelCorruptError if the stored values contradict each other.
        """


def empty_tensors(prefix: str, weights: WeightFormat, shape: LinearShape) -> dict[str, Tensor]:
    """Suffix in the checkpoint -> a tensor to fill, of one of the prefixes."""
    out_size = shape.out_sizes[shape.prefixes.index(prefix)]
    return {
        suffix: torch.empty(spec.shape, dtype=spec.dtype, device=shape.device)
        for suffix, spec in weights.tensors(prefix, shape.in_size, out_size).items()
    }


def refuse_not_finite(name: str, tensor: Tensor) -> None:
    """Raise ModelCorruptError if a tensor of floats holds infinity or NaN."""
    if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
        raise ModelCorruptError(f"{name} holds values that are not finite numbers. {REMEDY}")


def divide(name: str, what: str, size: int, divisor: int) -> int:
    """size / divisor. Raises ModelCorruptError if there is a remainder."""
    if size % divisor:
        raise ModelCorruptError(f"{name}: {size} {what} cannot be divided by {divisor}. {REMEDY}")
    return size // divisor


def unpack(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """i32 [R, C] -> i32 [R, C * 32 / bits], each from 0 to 2^bits - 1, lowest bits of a word first.

    ``order``: value j of a word is its field order[j], where fields are counted from the lowest bits.
    """
    fields = order or tuple(range(32 // bits))
    shifts = torch.tensor(fields, dtype=torch.int32, device=packed.device) * bits
    return ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def pack(values: Tensor, bits: int) -> Tensor:
    """Whole numbers [R, C] -> i32 [R, C * bits / 32], rounded up: the inverse of ``unpack``, padded with
    zeros.
    """
    each = 32 // bits
    padded = functional.pad(values.long(), (0, -values.shape[1] % each))
    shifts = torch.arange(each, device=values.device) * bits
    words = (padded.view(len(values), -1, each) << shifts).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
