"""Triton kernel of `topk_topp_threshold`: a radix search for the threshold, without a sort.

Imported only where there is a GPU (why: `add_rmsnorm_triton`). One program per row. Floats map to integers in
the same order; the threshold is the largest integer at and above which there is enough mass, found two bits
per sweep over the row, which stays in the L2 cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_MAX_BLOCK, _WARPS = 4096, 8


def topk_topp_threshold_triton(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, *, min_p: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As ``topk_topp_threshold``. The elements of a row must be contiguous.

    ``min_p`` f32 [B], 0 = off: also excludes tokens less probable than min_p times the most likely one.
    """
    rows, vocab_size = scaled.shape
    out = torch.empty(rows, dtype=torch.float32, device=scaled.device) if out is None else out
    if scaled.stride(-1) != 1 or vocab_size == 0 or scaled.dtype != torch.float32:
        raise ValueError("topk_topp_threshold: scaled must be float32, adjacent elements a row, at least one")
    threshold_kernel[(rows,)](
        scaled, top_k, top_p, min_p, out, scaled.stride(0), vocab_size,
        BLOCK=min(triton.next_power_of_2(vocab_size), _MAX_BLOCK), num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def threshold_kernel(
    scaled_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, scaled_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    given = scaled_ptr + row * scaled_stride
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    at = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(given + first + at, mask=first + at < vocab_size, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    lowest = _key(tl.full([1], float("-inf"), tl.float32))
    cut = lowest
    if top_k > 0:
        wanted = tl.minimum(top_k, vocab_size).to(tl.float32)
        cut = _search(given, vocab_size, lowest, top, wanted, BLOCK, False)
    if top_p < 1:
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocab_size, BLOCK):
            x = tl.load(given + first + at, mask=first + at < vocab_size, other=float("-inf"))
            total += tl.where(_key(x) >= cut, tl.exp(x - top), 0.0)
        # The search may end at a key below all kept tokens, which would readmit tokens that top-k removed.
        nucleus = _search(given, vocab_size, cut, top, top_p * tl.sum(total, 0), BLOCK, True)
        cut = tl.maximum(cut, tl.minimum(nucleus, _key(tl.full([1], 0.0, tl.float32) + top)))
    threshold = _number(cut)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row)
        threshold = tl.where(min_p > 0, tl.maximum(threshold, top + tl.log(min_p)), threshold)
    tl.store(out_ptr + row + tl.arange(0, 1), threshold)


@triton.jit
def _search(given, vocab_size, cut, top, wanted, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """The largest key at and above which the tokens not below ``cut`` have a total weight >= ``wanted``; u32
    [1].

    A token's weight is exp(x - top) if WEIGHED, otherwise 1.
    """
    at = tl.arange(0, BLOCK)
    found = tl.zeros([1], tl.uint32)
    for step in range(16):
        shift = 30 - 2 * step
        one, two = (
            found + (tl.full([1], 1, tl.uint32) << shift),
            found + (tl.full([1], 2, tl.uint32) << shift),
        )
        three = found + (tl.full([1], 3, tl.uint32) << shift)
        over_one, over_two = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        over_three = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocab_size, BLOCK):
            inside = first + at < vocab_size
            x = tl.load(given + first + at, mask=inside, other=float("-inf"))
            key = _key(x)
            weight = tl.exp(x - top) if WEIGHED else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(inside & (key >= cut), weight, 0.0)
            over_one += tl.where(key >= one, weight, 0.0)
            over_two += tl.where(key >= two, weight, 0.0)
            over_three += tl.where(key >= three, weight, 0.0)
        found = tl.where(
            tl.sum(over_three, 0) >= wanted, three,
            tl.where(tl.sum(over_two, 0) >= wanted, two, tl.where(tl.sum(over_one, 0) >= wanted, one, found)),
        )  # fmt: skip
    return found


@triton.jit
def _key(x):
    """u32 in the same order as the floats; both zeros map to one key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(key):
    return tl.where(key >> 31 == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


def _launch_config(*, min_p: bool) -> LaunchConfig:
    types = {
        "scaled_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32", "out_ptr": "*fp32",
        "scaled_stride": "i32", "vocab_size": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {"BLOCK": _MAX_BLOCK}
    if min_p:
        types["min_p_ptr"] = "*fp32"
    else:
        constants["min_p_ptr"] = None
    return LaunchConfig(
        "topk_topp_threshold" + (", min_p" if min_p else ""), threshold_kernel, types, constants,
        warps=_WARPS, aligned=frozenset({"scaled_stride", "vocab_size"}), expects=("load128",), min_blocks=2,
    )  # fmt: skip


LAUNCH_CONFIGS = (_launch_config(min_p=False), _launch_config(min_p=True))
