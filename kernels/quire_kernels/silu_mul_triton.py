"""`silu_mul` for CUDA tensors, imported only where there is a GPU (why: `add_rmsnorm_triton`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.configuration import Configuration

_BLOCK, _WARPS = 1024, 4


def silu_mul_triton(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As ``silu_mul``. Rows may lie apart, their elements may not."""
    tokens, width = gate_up.shape
    size = width // 2
    if width % 2 or gate_up.stride(-1) != 1:
        raise ValueError("silu_mul: gate_up must hold an even number of adjacent elements a row")
    if out is None:
        out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (tokens, size) or out.stride(-1) != 1:
        raise ValueError(f"silu_mul: out must be [{tokens}, {size}], its rows of adjacent elements")
    silu_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    y = activated(gate_up_ptr + row * gate_up_stride + at, size, inside)
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activated(given, size, inside):
    """silu(gate) * up in float32, of the gates at ``given`` and of what lies ``size`` after them."""
    gate = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(given + size, mask=inside, other=0.0)
    # Rounded before the product, where transformers rounds.
    return (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32) * up.to(tl.float32)


CONFIGURATIONS = (
    Configuration(
        "silu_mul bf16",
        silu_mul_kernel,
        {
            "gate_up_ptr": "*bf16",
            "out_ptr": "*bf16",
            "gate_up_stride": "i32",
            "out_stride": "i32",
            "size": "i32",
        },
        {"BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset({"gate_up_stride", "out_stride", "size"}),
        expects=("load128", "store128"),
        min_blocks=8,
    ),
)
