"""Triton kernel of `bidirectional_attention` (flash attention 2), imported only where there is a GPU (why:
`add_rmsnorm_triton`).

A program takes some tokens of one text with one head, and iterates over all keys of the text in tiles. It
finds its text by bisection of the bounds on the device, so that the host need not wait for them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.attention.paged_prefill_attention_triton import Tiling
from quire_kernels.launch_config import LaunchConfig

_LOG2_E = 1.4426950408889634


def bidirectional_tiling(head_size: int, element_size: int) -> Tiling:
    """Default tiling; ``element_size``: bytes of a query element."""
    if head_size > 128 or element_size > 2:
        return Tiling(32, 32, 4, 2)
    return Tiling(64, 64, 4, 2)


def bidirectional_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, *, tiling: Tiling | None = None
) -> Tensor:
    """As ``bidirectional_attention``; ``scale`` must be positive."""
    tokens, num_heads, head_size = q.shape
    if not q.shape == k.shape == v.shape or not q.stride() == k.stride() == v.stride():
        raise ValueError("bidirectional attention: q, k and v must have one shape and one layout")
    if q.stride()[1:] != (head_size, 1) or scale <= 0:
        raise ValueError("bidirectional attention: heads must be adjacent and the scale positive")
    out, texts = torch.empty_like(q, memory_format=torch.contiguous_format), cu_seqlens.shape[0] - 1
    if not tokens:
        return out
    tiling = tiling or bidirectional_tiling(head_size, q.element_size())
    # One more program per text: its last tokens may not fill one.
    bidirectional_kernel[(tokens // tiling.rows + texts, num_heads)](
        q,
        k,
        v,
        cu_seqlens,
        out,
        texts,
        q.stride(0),
        out.stride(0),
        scale * _LOG2_E,  # the kernel uses exp2
        SIZE=head_size,
        SIZE_BLOCK=triton.next_power_of_2(head_size),
        ROWS=tiling.rows,
        TILE=tiling.tile,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


@triton.jit
def _text_of(program, bounds_ptr, texts, ROWS: tl.constexpr):
    """The last text whose first program is at or before this one; each text has one spare program."""
    low = 0
    high = texts
    while low < high:
        middle = (low + high) // 2
        if tl.load(bounds_ptr + middle) // ROWS + middle <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["texts"])
def bidirectional_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, out_ptr, texts, stride, out_stride, scale,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.program_id(1)
    text = _text_of(program, bounds_ptr, texts, ROWS)
    start = tl.load(bounds_ptr + text).to(tl.int32)
    length = tl.load(bounds_ptr + text + 1).to(tl.int32) - start
    first = (program - start // ROWS - text) * ROWS
    if first >= length:
        return
    at = head * SIZE + tl.arange(0, SIZE_BLOCK)
    is_column = tl.arange(0, SIZE_BLOCK) < SIZE
    token = first + tl.arange(0, ROWS)
    inside = (token < length)[:, None] & is_column[None, :]
    place = (start + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + place * stride + at[None, :], mask=inside, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, SIZE_BLOCK], tl.float32)
    for first_key in range(0, length, TILE):
        key = first_key + tl.arange(0, TILE)
        there = key < length
        key_at = (start + key).to(tl.int64)[:, None] * stride + at[None, :]
        loaded = there[:, None] & is_column[None, :]
        k = tl.load(k_ptr + key_at, mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + key_at, mask=loaded, other=0.0)
        summed = tl.dot(p.to(v.dtype), v, summed * shrink[:, None], input_precision="ieee")
        highest = higher
    result = summed / total[:, None]
    out_at = place * out_stride + at[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def _launch_config(size: int, tiling: Tiling) -> LaunchConfig:
    types = {
        "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "bounds_ptr": "*i64", "out_ptr": "*bf16",
        "texts": "i32", "stride": "i32", "out_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "SIZE": size, "SIZE_BLOCK": triton.next_power_of_2(size), "ROWS": tiling.rows, "TILE": tiling.tile,
    }  # fmt: skip
    return LaunchConfig(
        f"bidirectional {size}, bf16: {tiling.rows} x {tiling.tile}/{tiling.warps}/{tiling.stages}",
        bidirectional_kernel,
        types,
        constants,
        warps=tiling.warps,
        stages=tiling.stages,
        aligned=frozenset({"stride", "out_stride"}),
        expects=("mma", "async128"),
    )


LAUNCH_CONFIGS = tuple(_launch_config(size, bidirectional_tiling(size, 2)) for size in (32, 64))
