"""Triton kernel of `add_rmsnorm_fp8`, imported only where there is a GPU (why: `add_rmsnorm_triton`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import FP8_GPUS, LaunchConfig
from quire_kernels.norm.add_rmsnorm_triton import normed_row
from quire_kernels.quantization.fp8_quantize_triton import fp8_out, quantised_row, row_warps


def add_rmsnorm_fp8_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``add_rmsnorm_fp8``. The elements of a row must be contiguous."""
    tokens, hidden = x.shape
    for name, given in (("x", x), ("residual", residual), ("weight", weight)):
        if given is not None and (given.stride(-1) != 1 or given.shape[-1] != hidden):
            raise ValueError(f"add_rmsnorm_fp8: {name} must hold {hidden} adjacent elements a row")
    values, scales = fp8_out("add_rmsnorm_fp8", tokens, hidden, x.device, out)
    block = triton.next_power_of_2(hidden)
    add_rmsnorm_fp8_kernel[(tokens,)](
        x, residual, weight, values, scales, x.stride(0), 0 if residual is None else residual.stride(0),
        values.stride(0), scales.stride(0), eps, HIDDEN=hidden, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
    return values, scales


@triton.jit
def add_rmsnorm_fp8_kernel(
    x_ptr, residual_ptr, weight_ptr, values_ptr, scales_ptr, x_stride, residual_stride, values_stride,
    scales_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    y = normed_row(x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, eps, row, at, inside, HIDDEN)
    values, scale = quantised_row(y.to(x_ptr.dtype.element_ty).to(tl.float32))
    tl.store(values_ptr + row * values_stride + at, values, mask=inside)
    tl.store(scales_ptr + row * scales_stride, scale)


def _launch_config(hidden: int, weight: str, *, residual: bool) -> LaunchConfig:
    block = triton.next_power_of_2(hidden)
    types = {
        "x_ptr": "*bf16", "weight_ptr": f"*{weight}", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32",
        "x_stride": "i32", "residual_stride": "i32", "values_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants: dict[str, object] = {"HIDDEN": hidden, "BLOCK": block, "scales_stride": 1}
    if residual:
        types["residual_ptr"] = "*bf16"
    else:
        constants["residual_ptr"] = None
    return LaunchConfig(
        f"fp8 of add_rmsnorm bf16, weight {weight}, {hidden}" + ("" if residual else ", no residual"),
        add_rmsnorm_fp8_kernel,
        types,
        constants,
        warps=row_warps(block),
        aligned=frozenset({"x_stride", "residual_stride", "values_stride"}),
        expects=("load128",),
        gpus=FP8_GPUS,
    )


LAUNCH_CONFIGS = (
    _launch_config(4096, "bf16", residual=True),
    _launch_config(4096, "bf16", residual=False),
    _launch_config(8192, "bf16", residual=True),
    _launch_config(2560, "fp32", residual=True),
)
