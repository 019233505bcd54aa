"""Linear layer with int8 weights (one scale per output) and int8 activations (one scale per row, found on the
way). Called by the int8 linear layer.

A row's scale is its own greatest value, so that an answer never depends on its neighbours in the batch; the
sums are integers, exact in any order. Three ways to the same bits: the native kernel, oneDNN, plain torch.
Scheme: LLM.int8() (Dettmers et al. 2022) without outliers, symmetric.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.native import NATIVE


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantised matrix in the form that this machine multiplies fastest."""

    packed: Tensor
    scales: Tensor  # f32 [out]
    is_native: bool


def quantise_int8(weight: Tensor) -> Int8Weight:
    """[out, in], any float dtype, is rounded to int8 by its rows and packed."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    divisors = torch.where(scales > 0, scales, 1.0)
    return pack_int8(torch.round(wide / divisors[:, None]).to(torch.int8), scales)


def pack_int8(values: Tensor, scales: Tensor) -> Int8Weight:
    """int8 [out, in] and float32 [out], for what is quantised already."""
    out_size, in_size = values.shape
    if NATIVE is not None and out_size % 16 == 0 and in_size % 32 == 0:
        shifted = (values.view(torch.uint8) ^ 0x80).view(out_size // 16, 16, in_size // 4, 4)
        return Int8Weight(shifted.permute(0, 2, 1, 3).contiguous(), scales, True)
    return Int8Weight(torch.ops.onednn.qlinear_prepack(values.contiguous(), None), scales, False)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype; bias float32 [out]."""
    if weight.is_native:
        assert NATIVE is not None
        return NATIVE.int8_linear(x.contiguous(), weight.packed, weight.scales, bias)
    quantised, row_scales = quantise_rows(x)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        (quantised.view(torch.uint8) ^ 0x80),  # oneDNN is fast with uint8 activations only
        1.0,
        128,
        weight.packed,
        weight.scales,
        torch.zeros(weight.scales.shape[0], dtype=torch.int64),
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    y *= row_scales
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [T, in], float32 scales [T, 1]). What is not finite makes its row's scale NaN, to be seen."""
    wide = x.float()
    peaks = wide.abs().amax(dim=-1, keepdim=True)
    # A true division: `127 / peaks` would be the reciprocal times 127, rounded twice.
    factors = torch.where(peaks > 0, torch.full_like(peaks, 127).div_(peaks), 0.0)
    values = torch.round(wide * factors).nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return values, torch.where(peaks.isfinite(), peaks / 127, torch.nan)


def int8_linear_reference(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The definition, with exact integer sums; ``values`` int8 [out, in]."""
    quantised, row_scales = quantise_rows(x)
    sums = quantised.double() @ values.double().T
    y = sums.float() * scales * row_scales
    return (y if bias is None else y + bias).to(x.dtype)
