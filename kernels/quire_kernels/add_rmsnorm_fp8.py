"""`add_rmsnorm` whose result is quantised to float8 before it leaves the registers. Called twice per layer by
the norm layer where linear layers of float8 weights follow.
"""

import torch
from torch import Tensor

from quire_kernels.add_rmsnorm import add_rmsnorm_reference
from quire_kernels.fp8_quantize import Quantized, fp8_quantize_reference

if torch.cuda.is_available():
    from quire_kernels.add_rmsnorm_fp8_triton import add_rmsnorm_fp8_triton


def add_rmsnorm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Quantized | None = None
) -> Quantized:
    """``fp8_quantize`` of ``add_rmsnorm``, which is rounded to x's dtype in between: to the bit what the two
    would give one after the other.
    """
    if x.is_cuda:
        return add_rmsnorm_fp8_triton(x, residual, weight, eps, out=out)
    return add_rmsnorm_fp8_reference(x, residual, weight, eps, out=out)


def add_rmsnorm_fp8_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Quantized | None = None
) -> Quantized:
    """One after the other."""
    return fp8_quantize_reference(add_rmsnorm_reference(x, residual, weight, eps), out=out)
