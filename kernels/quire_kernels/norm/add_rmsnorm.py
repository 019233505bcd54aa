"""Residual add and RMS norm in one pass."""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.cpu.native import NATIVE

if torch.cuda.is_available():
    from quire_kernels.norm.add_rmsnorm_triton import add_rmsnorm_triton


def add_rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """RMS norm of ``x + residual``; the sum is stored in ``residual``. All [tokens, hidden], weight [hidden].

    With residual None (first layer) the norm of ``x``. A float32 weight is applied before the result is
    rounded to the dtype of ``x`` (as Gemma does), a weight of that dtype after the rounding (as Llama does).
    """
    if x.is_cuda:
        return add_rmsnorm_triton(x, residual, weight, eps, out=out)
    y = _on_cpu(x, residual, weight, eps)
    return y if out is None else out.copy_(y)


def _on_cpu(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if NATIVE is not None and NATIVE.supports(x, residual, weight):
        return NATIVE.add_rmsnorm(x, residual, weight, eps)
    if x.device.type == "cpu" and x.dtype == torch.float32:
        summed = x if residual is None else residual.add_(x)
        return functional.rms_norm(summed, (summed.shape[-1],), weight, eps)
    return add_rmsnorm_reference(x, residual, weight, eps)


def add_rmsnorm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """As in transformers: the sum is rounded to the residual's dtype, the norm is computed in float32."""
    summed = x if residual is None else residual.add_(x)
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(summed.dtype)
