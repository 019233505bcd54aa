"""Linear layer with FP8 weights and dynamic per-token FP8 quantization of its input."""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.quantization.fp8_quantize import Quantized, fp8_quantize, fp8_quantize_reference

ALIGNED = 16  # `torch._scaled_mm` requires multiples of it for both sizes


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bf16 [T, K] -> [T, N]; ``weight`` e4m3 [N, K], ``scales`` f32 [N] of its rows, bias bf16 [N]."""
    return fp8_product(fp8_quantize(x), weight, scales, bias, x.dtype)


def fp8_product(
    rounded: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As ``fp8_linear``, of an input that is already quantized; ``dtype``: the result's, bf16."""
    if weight.device.type != "cuda":  # `_scaled_mm` has no CPU implementation
        return _product(rounded, weight, scales, bias, dtype)
    values, row_scales = rounded
    return torch._scaled_mm(
        values,
        weight.T,
        scale_a=row_scales,
        scale_b=scales[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,  # sums keep about 14 bits, and the inputs have 4
    )


def fp8_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float32, after quantization of the input."""
    return _product(fp8_quantize_reference(x), weight, scales, bias, x.dtype)


def _product(
    stored: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    values, row_scales = stored
    y = functional.linear(values.float() * row_scales, weight.float() * scales[:, None])
    return (y if bias is None else y + bias.float()).to(dtype)
