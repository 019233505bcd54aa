"""`add_rmsnorm` fused with FP8 quantization of its result, for linear layers with FP8 weights."""

import torch
from torch import Tensor

from quire_kernels.norm.add_rmsnorm import add_rmsnorm_reference
from quire_kernels.quantization.fp8_quantize import Quantized, fp8_quantize_reference

if torch.cuda.is_available():
    from quire_kernels.norm.add_rmsnorm_fp8_triton import add_rmsnorm_fp8_triton


def add_rmsnorm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Quantized | None = None
) -> Quantized:
    """Bitwise equal to ``fp8_quantize(add_rmsnorm(...))``, which rounds to the dtype of x in between."""
    if x.is_cuda:
        return add_rmsnorm_fp8_triton(x, residual, weight, eps, out=out)
    return add_rmsnorm_fp8_reference(x, residual, weight, eps, out=out)


def add_rmsnorm_fp8_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Quantized | None = None
) -> Quantized:
    """The two references, one after the other."""
    return fp8_quantize_reference(add_rmsnorm_reference(x, residual, weight, eps), out=out)
