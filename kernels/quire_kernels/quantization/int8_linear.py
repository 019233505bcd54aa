"""INT8 linear layer for CPUs: weights with one scale per output, inputs quantized in groups of 64 elements.

The scales of an input row come from that row alone, so a result does not depend on the other rows of the
batch. Sums within a group are integers and exact in any order, and groups are added in a fixed order: the C
kernel and torch give bitwise equal results. Groups limit the effect of activation outliers (Dettmers et al.
2022) to the group that contains them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.cpu.native import NATIVE

GROUP = 64


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantized matrix, packed for the implementation that this machine uses."""

    packed: Tensor
    scales: Tensor  # f32 [out]
    is_native: bool


def quantise_int8(weight: Tensor) -> Int8Weight:
    """Quantize [out, in] of any float dtype, one scale per row, and pack it."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    divisors = torch.where(scales > 0, scales, 1.0)
    return pack_int8(torch.round(wide / divisors[:, None]).to(torch.int8), scales)


def pack_int8(values: Tensor, scales: Tensor) -> Int8Weight:
    """Pack a matrix that is already quantized: int8 [out, in], scales float32 [out]."""
    out_size, in_size = values.shape
    if NATIVE is not None and out_size % 16 == 0 and in_size % GROUP == 0:
        shifted = (values.view(torch.uint8) ^ 0x80).view(out_size // 16, 16, in_size // 4, 4)
        return Int8Weight(shifted.permute(0, 2, 1, 3).contiguous(), scales, True)
    return Int8Weight(_grouped(values).float().transpose(1, 2).contiguous(), scales, False)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype; bias float32 [out]."""
    if weight.is_native:
        assert NATIVE is not None
        return NATIVE.int8_linear(x.contiguous(), weight.packed, weight.scales, bias)
    return _by_torch(x, weight.packed, weight.scales, bias)


def quantise_groups(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """(int8 [groups, T, group], float32 scales [groups, T, 1]); NaN or infinity makes a group's scale NaN."""
    wide = _grouped(x.float(), group)
    peaks = wide.abs().amax(dim=-1, keepdim=True)
    # A division, rounded once: torch computes `127 / peaks` as the reciprocal times 127, rounded twice.
    factors = torch.where(peaks > 0, torch.full_like(peaks, 127).div_(peaks), 0.0)
    values = torch.round(wide * factors).nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return values, torch.where(peaks.isfinite(), peaks / 127, torch.nan)


def int8_linear_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The definition; ``values`` int8 [out, in]."""
    return _by_torch(x, _grouped(values).float().transpose(1, 2), scales, bias)


def _by_torch(x: Tensor, groups: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``groups`` float32 [groups, 64, out] hold integers: sums of 64 products stay below 2^24, exact."""
    quantised, row_scales = quantise_groups(x)
    y = torch.zeros(x.shape[0], scales.shape[0])
    for numbers, row_scale, weights in zip(quantised, row_scales, groups, strict=True):
        y += (numbers.float() @ weights) * row_scale
    y *= scales
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _grouped(rows: Tensor, group: int = GROUP) -> Tensor:
    """[R, in] -> [groups, R, group], the last group padded with zeros."""
    padded = functional.pad(rows, (0, -rows.shape[1] % group))
    return padded.view(rows.shape[0], padded.shape[1] // group, group).transpose(0, 1)
