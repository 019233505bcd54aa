"""Triton kernel of `silu_mul`, imported only where there is a GPU (why: `add_rmsnorm_triton`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activation.gated_activation_triton import gated_launch_config, gated_triton


def silu_mul_triton(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As ``silu_mul``. The elements of a row must be contiguous."""
    return gated_triton("silu_mul", silu_mul_kernel, gate_up, out)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    y = activated(gate_up_ptr + row * gate_up_stride + at, size, inside)
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activated(given, size, inside):
    """silu(gate) * up in float32; the gates are at ``given``, the ups ``size`` elements after them."""
    gate = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(given + size, mask=inside, other=0.0)
    # Rounded before the product, as in transformers.
    return (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32) * up.to(tl.float32)


LAUNCH_CONFIGS = (gated_launch_config("silu_mul", silu_mul_kernel),)
