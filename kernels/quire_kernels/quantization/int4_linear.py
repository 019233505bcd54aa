"""INT4 linear layer for CPUs: weights in groups of 32 with a scale and a zero each, inputs quantized to int8.

An input row has a scale for each 32 elements, from that row alone, so a result does not depend on the other
rows of the batch. Sums within a group are integers and exact in any order, and groups are added in a fixed
order: the C kernel and torch give bitwise equal results.

Checkpoints with groups of 64 or 128 are groups of 32 with repeated scales. Group scales are float16 times a
power of two for each row, which keeps those of float16 and bfloat16 checkpoints exact whatever their range,
unless they are less than 2^-14 of the row's largest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.cpu.native import NATIVE
from quire_kernels.quantization.int8_linear import quantise_groups
from quire_kernels.quantization.w4a16_packing import W4Weight

GROUP = 32
SYMMETRIC_ZERO = 8
_LANES = 16
#: Which number the largest weight of a group becomes: the scales that are tried.
_ENDS = (7.0, 8.0, 9.0)
#: Smaller weights count as zeros: the factors of a group of them would be infinite.
_LEAST = 2.0**-120
_AT_ONCE = 1 << 16  # weights that are rounded at once: what stays in the cache


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A quantized matrix, packed for the implementation that this machine uses."""

    packed: Tensor
    scales: Tensor  # f16: native [out / 16, groups, 16], else [out, groups]
    zeros: Tensor | None  # u8, like the scales; None: 8
    row_scales: Tensor  # f32 [out], powers of two
    is_native: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a product reads."""
        zeros = () if self.zeros is None else (self.zeros,)
        return (self.packed, self.scales, self.row_scales, *zeros)


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor | None) -> Int4Weight:
    """Pack a matrix that is already quantized: u8 [out, in] from 0 to 15; scales float and zeros u8 [out,
    groups], of equal groups that are multiples of 32; without zeros all are 8.
    """
    repeats = values.shape[1] // GROUP // scales.shape[1]
    row_scales = _powers_of_two(scales.float().abs().amax(1))
    halves = (scales.float() / row_scales[:, None]).half().repeat_interleave(repeats, 1)
    if zeros is not None:
        is_symmetric = bool((zeros == SYMMETRIC_ZERO).all())
        zeros = None if is_symmetric else zeros.repeat_interleave(repeats, 1)
    out_size, in_size = values.shape
    if NATIVE is None or out_size % _LANES:
        return Int4Weight(_centred(values, zeros), halves, None, row_scales, is_native=False)
    low, high = values.view(out_size // _LANES, _LANES, in_size // 8, 2, 4).unbind(3)
    packed = (low | high << 4).transpose(1, 2).contiguous()
    scales, zeros = _in_panels(halves), None if zeros is None else _in_panels(zeros)
    return Int4Weight(packed, scales, zeros, row_scales, is_native=True)


def repack_int4(weights: Sequence[W4Weight]) -> Int4Weight:
    """The matrix of these parts side by side, which have their inputs in their own order."""
    parts = [_unpacked(weight) for weight in weights]
    values, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return pack_int4(values, scales, zeros)


def quantise_int4(weight: Tensor) -> Int4Weight:
    """Round [out, in] of any float dtype, in a multiple of 32, with the zero 8, and pack it."""
    rounded = [_round(rows) for rows in weight.split(max(1, _AT_ONCE // weight.shape[1]))]
    values, scales = (torch.cat(tensors) for tensors in zip(*rounded, strict=True))
    return pack_int4(values, scales, None)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype; bias float32 [out]."""
    if weight.is_native:
        assert NATIVE is not None
        return NATIVE.int4_linear(
            x.contiguous(), weight.packed, weight.scales, weight.zeros, weight.row_scales, bias
        )
    return _by_torch(x, weight.packed, weight.scales, weight.row_scales, bias)


def int4_linear_reference(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The definition; arguments as of ``pack_int4``, in groups of 32."""
    row_scales = _powers_of_two(scales.float().abs().amax(1))
    halves = (scales.float() / row_scales[:, None]).half()
    return _by_torch(x, _centred(values, zeros), halves, row_scales, bias)


def _by_torch(x: Tensor, groups: Tensor, scales: Tensor, row_scales: Tensor, bias: Tensor | None) -> Tensor:
    """``groups`` float32 [groups, 32, out] hold integers: sums of 32 products stay below 2^24, exact."""
    quantised, input_scales = quantise_groups(x, GROUP)
    y = torch.zeros(x.shape[0], scales.shape[0])
    for numbers, input_scale, weights, scale in zip(
        quantised, input_scales, groups, scales.float().T, strict=True
    ):
        y += (numbers.float() @ weights) * input_scale * scale
    y *= row_scales
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _centred(values: Tensor, zeros: Tensor | None) -> Tensor:
    """float32 [groups, 32, out]: values minus zeros."""
    grouped = values.float().view(values.shape[0], -1, GROUP)
    subtracted = SYMMETRIC_ZERO if zeros is None else zeros.float()[:, :, None]
    return (grouped - subtracted).permute(1, 2, 0).contiguous()


def _in_panels(groups: Tensor) -> Tensor:
    """[out, groups] -> [out / 16, groups, 16]."""
    return groups.view(-1, _LANES, groups.shape[1]).transpose(1, 2).contiguous()


def _powers_of_two(numbers: Tensor) -> Tensor:
    """The least that are more than the numbers; of zeros 1."""
    return torch.ldexp(torch.ones_like(numbers), torch.frexp(numbers).exponent)


def _unpacked(weight: W4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, zeros) as of ``pack_int4``."""
    inputs, outputs = weight.shape
    halves = weight.packed.view(-1, 1, weight.group // 2, outputs)
    values = torch.cat((halves & 15, halves >> 4), dim=1).view(inputs, outputs)
    return values.T, weight.scales.T, weight.zeros.T


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values u8 [out, in], scales float32 [out, groups]): of some scales those of the least squared errors.

    The largest weight of a group is near -8 times its scale, whatever its sign: of the 16 numbers one more is
    below zero than above it.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    peaks = torch.where(high > -low, high, low)
    factors = torch.where(peaks.abs() < _LEAST, 0.0, -1 / peaks)
    # With the best scale for these numbers the squared error is that of zeros less this gain.
    most, best = torch.full_like(peaks, -1), torch.zeros_like(peaks)
    for end in _ENDS:
        products, squares = _products(groups, _nearest(groups, factors * end))
        gains = products * products / squares
        most, best = torch.where(gains > most, gains, most), torch.where(gains > most, end, best)
    values = _nearest(groups, factors * best)
    products, squares = _products(groups, values)
    scales = torch.where(groups.isfinite().all(-1, keepdim=True), products / squares, torch.nan)
    return (values + SYMMETRIC_ZERO).nan_to_num(0.0).to(torch.uint8).flatten(1), scales.squeeze(-1)


def _nearest(groups: Tensor, factors: Tensor) -> Tensor:
    """Whole numbers, -8 to 7."""
    return torch.mul(groups, factors).round_().clamp_(-SYMMETRIC_ZERO, SYMMETRIC_ZERO - 1)


def _products(groups: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of the weights with the numbers, and of the numbers with themselves, which is at least 1."""
    squares = (values * values).sum(-1, keepdim=True)
    return (values * groups).sum(-1, keepdim=True), squares.clamp_(min=1)
