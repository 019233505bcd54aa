"""Triton kernel of `gelu_tanh_mul`, imported only where there is a GPU (why: `add_rmsnorm_triton`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activation.gated_activation_triton import gated_launch_config, gated_triton


def gelu_tanh_mul_triton(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As ``gelu_tanh_mul``. The elements of a row must be contiguous."""
    return gated_triton("gelu_tanh_mul", gelu_tanh_mul_kernel, gate_up, out)


@triton.jit
def gelu_tanh_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    given = gate_up_ptr + row * gate_up_stride + at
    gate = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(given + size, mask=inside, other=0.0)
    # 0.5 x (1 + tanh u) = x sigmoid(2 u), since triton has no tanh.
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate * tl.sigmoid(2 * inner)).to(up.dtype).to(tl.float32)
    y = (activated * up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + at, y, mask=inside)


LAUNCH_CONFIGS = (gated_launch_config("gelu_tanh_mul", gelu_tanh_mul_kernel),)
