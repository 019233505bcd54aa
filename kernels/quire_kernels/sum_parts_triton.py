"""Triton kernel of the reduction after split-K: adds partial sums in float32, in a fixed order."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_BLOCK, _WARPS = 1024, 4


def sum_parts_triton(parts: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """parts [P, T, N] plus bias [N] -> out [T, N]; the elements of a row must be contiguous."""
    count, rows, size = parts.shape
    sum_parts_kernel[(rows, triton.cdiv(size, _BLOCK))](
        parts, bias, out, size, parts.stride(0), parts.stride(1), out.stride(0), PARTS=count, BLOCK=_BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def sum_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, size, part_stride, row_stride, out_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    given = parts_ptr + row * row_stride + at
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(given, mask=inside, other=0.0).to(tl.float32)
        given += part_stride
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def _launch_config(parts: int, dtype: str) -> LaunchConfig:
    strides = {"size": "i32", "part_stride": "i32", "row_stride": "i32", "out_stride": "i32"}
    return LaunchConfig(
        f"sum_parts, {parts} of {dtype}",
        sum_parts_kernel,
        {"parts_ptr": f"*{dtype}", "out_ptr": "*bf16", **strides},
        {"bias_ptr": None, "PARTS": parts, "BLOCK": _BLOCK},
        warps=_WARPS,
        aligned=frozenset(strides),
        expects=("load128", "store128"),
        min_blocks=8,
    )


LAUNCH_CONFIGS = (_launch_config(8, "fp32"), _launch_config(8, "bf16"))
