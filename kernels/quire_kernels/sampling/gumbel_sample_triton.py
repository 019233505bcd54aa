"""Triton kernel of `gumbel_sample`: one pass over the logits, without softmax or sort.

Imported only where there is a GPU (why: `add_rmsnorm_triton`). Each program generates the noise of some
tokens and keeps the best token; a second kernel reduces over the programs. The noise is the reference's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.launch_config import LaunchConfig

_BLOCK, _WARPS = 1024, 4
_REDUCE_WARPS = 1


def gumbel_sample_triton(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    threshold: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``gumbel_sample``; a row of temperature 0 gives the largest logit, so one launch serves all rows.

    The elements of a row must be contiguous. NaN counts as larger than all numbers, as in torch's argmax; of
    equal scores the first wins.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if logits.stride(-1) != 1 or vocab_size == 0:
        raise ValueError("gumbel_sample: logits must hold at least one token, and adjacent elements a row")
    blocks = triton.cdiv(vocab_size, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    gumbel_kernel[(rows, blocks)](
        logits, temperature, seeds, positions, threshold, best, token, logits.stride(0), vocab_size,
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    best_kernel[(rows,)](
        best, token, out, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=_REDUCE_WARPS
    )
    return out


@triton.jit
def gumbel_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, threshold_ptr, best_ptr, token_ptr, logits_stride,
    vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    score = logits
    if temperature > 0:
        score = tl.div_rn(logits, tl.zeros([BLOCK], tl.float32) + temperature)
        if threshold_ptr is not None:
            score = tl.where(score < tl.load(threshold_ptr + row), float("-inf"), score)
        score += _gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), block, BLOCK)
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(inside, score, float("-inf"))
    best, first = tl.max(score, 0, return_indices=True)
    tl.store(best_ptr + row * tl.num_programs(1) + block, best)
    tl.store(token_ptr + row * tl.num_programs(1) + block, block * BLOCK + first)


@triton.jit
def _gumbel(seed, position, block, BLOCK: tl.constexpr):
    """As ``gumbel_noise``: token 4 c + lane takes that lane of Philox(counter c, position, key seed)."""
    counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    low = (counter * 0 + (position & 0xFFFFFFFF).to(tl.uint32)).to(tl.uint32)
    high = (counter * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, low, high, counter * 0)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    # (word + 1/2) / 2^32, rounded once.
    uniform = (words.to(tl.uint64) * 2 + 1).to(tl.float32) * (2.0**-33)
    # log(1 - uniform) without cancellation (Kahan): tiny uniforms give the largest noise.
    rest = 1.0 - uniform
    tiny = rest == 1.0
    log1p = tl.where(tiny, -uniform, tl.log(rest) * tl.div_rn(-uniform, tl.where(tiny, 1.0, rest - 1.0)))
    return -tl.log(-log1p)


@triton.jit
def best_kernel(best_ptr, token_ptr, out_ptr, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * blocks + at, mask=at < blocks, other=float("-inf"))
    _, first = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(token_ptr + row * blocks + first).to(tl.int64))


def _launch_config(dtype: str, *, threshold: bool) -> LaunchConfig:
    types = {
        "logits_ptr": f"*{dtype}", "temperature_ptr": "*fp32", "seeds_ptr": "*i64", "positions_ptr": "*i64",
        "best_ptr": "*fp32", "token_ptr": "*i32", "logits_stride": "i32", "vocab_size": "i32",
    }  # fmt: skip
    constants: dict[str, object] = {"BLOCK": _BLOCK}
    if threshold:
        types["threshold_ptr"] = "*fp32"
    else:
        constants["threshold_ptr"] = None
    return LaunchConfig(
        f"gumbel_sample {dtype}" + (", threshold" if threshold else ""), gumbel_kernel, types, constants,
        warps=_WARPS, aligned=frozenset({"logits_stride", "vocab_size"}), expects=("load128",), min_blocks=4,
    )  # fmt: skip


LAUNCH_CONFIGS = (
    _launch_config("fp32", threshold=False),
    _launch_config("fp32", threshold=True),
    _launch_config("bf16", threshold=False),
    LaunchConfig(
        "gumbel_sample, the best of 128 blocks",
        best_kernel,
        {"best_ptr": "*fp32", "token_ptr": "*i32", "out_ptr": "*i64", "blocks": "i32"},
        {"BLOCK": 128},
        warps=_REDUCE_WARPS,
    ),
)
