"""Dynamic per-token FP8 quantization of activations, as `torch._scaled_mm` takes them.

For linear layers that do not follow a norm or an activation: those have fused variants.
"""

import torch
from torch import Tensor

from quire_kernels.quantization.row_quantization import quantize_rows

if torch.cuda.is_available():
    from quire_kernels.quantization.fp8_quantize_triton import fp8_quantize_triton

Quantized = tuple[Tensor, Tensor]  # e4m3 [T, K] and scales f32 [T, 1]


def fp8_quantize(x: Tensor, *, out: Quantized | None = None) -> Quantized:
    """x [T, K] -> (e4m3 [T, K], scales f32 [T, 1]), so that stored * scale approximates x.

    The scale is a row's largest magnitude over 448; a row with a NaN or an infinity gets the scale NaN.
    """
    return fp8_quantize_triton(x, out=out) if x.is_cuda else fp8_quantize_reference(x, out=out)


def fp8_quantize_reference(x: Tensor, *, out: Quantized | None = None) -> Quantized:
    """By the same function as keys and values."""
    values, scales = quantize_rows(x, torch.float8_e4m3fn)
    if out is None:
        return values, scales[:, None]
    out[0].copy_(values)
    out[1].copy_(scales[:, None])
    return out
