"""Activations in float8 with a scale for each token, as `torch._scaled_mm` takes them. Called before a linear
layer of float8 weights where no norm and no activation comes first; those have their own variants.
"""

import torch
from torch import Tensor

from quire_kernels.kv_quantization import quantize_kv

if torch.cuda.is_available():
    from quire_kernels.fp8_quantize_triton import fp8_quantize_triton

Quantized = tuple[Tensor, Tensor]  # e4m3 [T, K] and scales f32 [T, 1]


def fp8_quantize(x: Tensor, *, out: Quantized | None = None) -> Quantized:
    """x [T, K] -> (e4m3 [T, K], scales f32 [T, 1]), so that stored * scale is near x.

    The scale is a row's largest element over 448. What is not finite makes its whole row not a number.
    """
    return fp8_quantize_triton(x, out=out) if x.is_cuda else fp8_quantize_reference(x, out=out)


def fp8_quantize_reference(x: Tensor, *, out: Quantized | None = None) -> Quantized:
    """As keys and values are quantised."""
    values, scales = quantize_kv(x, torch.float8_e4m3fn)
    if out is None:
        return values, scales[:, None]
    out[0].copy_(values)
    out[1].copy_(scales[:, None])
    return out
