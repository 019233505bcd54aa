"""A linear layer of float8 weights, whose inputs are rounded to float8 on the way, each row by itself. Called
by the linear layers of such checkpoints.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.fp8_quantize import Quantized, fp8_quantize, fp8_quantize_reference

ALIGNED = 16  # inputs and outputs must be a multiple of it: `torch._scaled_mm`


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bf16 [T, K] -> [T, N]; ``weight`` e4m3 [N, K], ``scales`` f32 [N] of its rows, bias bf16 [N]."""
    return fp8_product(fp8_quantize(x), weight, scales, bias, x.dtype)


def fp8_product(
    rounded: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same of inputs that are rounded already; ``dtype`` bf16, the result's."""
    if weight.device.type != "cuda":  # the kernel before it can be interpreted, and a vendor's product cannot
        return _product(rounded, weight, scales, bias, dtype)
    values, row_scales = rounded
    return torch._scaled_mm(
        values, weight.T, scale_a=row_scales, scale_b=scales[None], bias=bias, out_dtype=dtype
    )


def fp8_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float32, of what float8 leaves."""
    return _product(fp8_quantize_reference(x), weight, scales, bias, x.dtype)


def _product(
    stored: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    values, row_scales = stored
    y = functional.linear(values.float() * row_scales, weight.float() * scales[:, None])
    return (y if bias is None else y + bias.float()).to(dtype)
