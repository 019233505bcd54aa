"""Triton kernel of `add_rmsnorm`: one program per row, which it holds in registers.

Like every `*_triton.py`, imported by its op only where there is a GPU: importing triton costs 0.1 to 0.2 s
and 50 MB, which an engine on a CPU would pay for nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig


def add_rmsnorm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """As ``add_rmsnorm``. The elements of a row must be contiguous; ``out`` may be ``x``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    tokens, hidden = x.shape
    for name, given in (("x", x), ("residual", residual), ("weight", weight), ("out", out)):
        if given is not None and (given.stride(-1) != 1 or given.shape[-1] != hidden):
            raise ValueError(f"add_rmsnorm: {name} must hold {hidden} adjacent elements a row")
    block = triton.next_power_of_2(hidden)
    add_rmsnorm_kernel[(tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def add_rmsnorm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    y = normed_row(x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, eps, row, at, inside, HIDDEN)
    tl.store(out_ptr + row * out_stride + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normed_row(
    x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, eps, row, at, inside, HIDDEN: tl.constexpr
):
    """The norm of a row in float32, zeros beyond its end; stores the sum in the residual."""
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        place = residual_ptr + row * residual_stride + at
        # The norm is of the sum as it is stored, rounded to the residual's dtype.
        kept = (x + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, kept, mask=inside)
        x = kept.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    return normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


def _launch_config(hidden: int, dtype: str, weight: str, *, residual: bool) -> LaunchConfig:
    block = triton.next_power_of_2(hidden)
    types = {
        "x_ptr": f"*{dtype}", "residual_ptr": f"*{dtype}", "weight_ptr": f"*{weight}", "out_ptr": f"*{dtype}",
        "x_stride": "i32", "residual_stride": "i32", "out_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {"HIDDEN": hidden, "BLOCK": block}
    if not residual:
        del types["residual_ptr"]
        constants["residual_ptr"] = None
    what = "" if residual else ", no residual"
    return LaunchConfig(
        f"add_rmsnorm {dtype}, weight {weight}, {hidden}{what}",
        add_rmsnorm_kernel,
        types,
        constants,
        warps=_warps(block),
        aligned=frozenset({"x_stride", "residual_stride", "out_stride"}),
        expects=("load128", "store128"),
    )


LAUNCH_CONFIGS = (
    _launch_config(4096, "bf16", "bf16", residual=True),
    _launch_config(4096, "bf16", "bf16", residual=False),
    _launch_config(8192, "bf16", "bf16", residual=True),
    _launch_config(2560, "bf16", "fp32", residual=True),
    _launch_config(576, "bf16", "bf16", residual=True),
)
