"""Triton kernels of `moe`, imported only where there is a GPU (why: `add_rmsnorm_triton`).

Seven launches, whose grids depend on shapes alone, as CUDA graphs need: routing; grouping of the (token,
expert) pairs by expert (two); the gate and up projections of all groups; the activation; the down projections
times the routing weights; and the sum over a token's experts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.activation.silu_mul_triton import silu_mul_triton
from quire_kernels.launch_config import LaunchConfig
from quire_kernels.moe.group_rows_triton import group_rows_triton
from quire_kernels.moe.grouped_linear_triton import (
    grouped_linear_launch_config,
    grouped_linear_triton,
    rows_at_once,
)
from quire_kernels.sum_parts_triton import sum_parts_triton

_WARPS = 1


def moe_triton(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    per_token: int,
    *,
    normalises: bool,
    first: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """As ``moe``. The elements of a row must be contiguous."""
    (tokens, hidden), experts = x.shape, gate_up.shape[0]
    if (
        router_logits.shape[0] != tokens
        or not 0 <= first <= router_logits.shape[1] - experts
        or down.shape != (experts, hidden, gate_up.shape[1] // 2)
    ):
        raise ValueError(
            f"moe: x {list(x.shape)}, router_logits {list(router_logits.shape)}, gate_up "
            f"{list(gate_up.shape)} and down {list(down.shape)} do not fit"
        )
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != (tokens, hidden) or out.stride(-1) != 1:
        raise ValueError(f"moe: out must be [{tokens}, {hidden}], adjacent elements a row")
    if tokens == 0:
        return out
    weights, chosen = moe_route_triton(router_logits, per_token, normalises=normalises)
    chosen = chosen.view(-1)
    others = None
    if experts < router_logits.shape[1]:
        others = (chosen < first) | (chosen >= first + experts)
        chosen = (chosen - first).masked_fill_(others, -1)
    groups = group_rows_triton(chosen, experts, rows_at_once(tokens * per_token, experts))
    inner = silu_mul_triton(grouped_linear_triton(x, gate_up, groups, per_row=per_token)[0])
    (parts,) = grouped_linear_triton(inner, down, groups, scales=weights.view(-1))
    if others is not None:
        parts.masked_fill_(others[:, None], 0.0)  # nothing was written to their rows
    return sum_parts_triton(parts.view(tokens, per_token, hidden).transpose(0, 1), out)


def moe_route_triton(router_logits: Tensor, per_token: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
    """As ``moe_route_reference``."""
    tokens, experts = router_logits.shape
    if router_logits.stride(-1) != 1 or not 0 < per_token <= experts:
        raise ValueError(
            f"moe: {per_token} of {experts} experts a token, and router_logits must hold adjacent elements"
        )
    weights = torch.empty(tokens, per_token, dtype=torch.float32, device=router_logits.device)
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=router_logits.device)
    moe_route_kernel[(tokens,)](
        router_logits, weights, chosen, router_logits.stride(0), experts, PER_TOKEN=per_token,
        NORMALISES=normalises, BLOCK=triton.next_power_of_2(experts),
        RANKS_BLOCK=triton.next_power_of_2(per_token), num_warps=_WARPS,
    )  # fmt: skip
    return weights, chosen


@triton.jit
def moe_route_kernel(
    logits_ptr, weights_ptr, chosen_ptr, logits_stride, experts, PER_TOKEN: tl.constexpr,
    NORMALISES: tl.constexpr, BLOCK: tl.constexpr, RANKS_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, RANKS_BLOCK)
    inside = expert < experts
    x = tl.load(logits_ptr + token * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    shares = tl.exp(x - tl.max(x, 0))
    shares = tl.div_rn(shares, tl.zeros([BLOCK], tl.float32) + tl.sum(shares, 0))
    # With NaN logits, valid experts are chosen all the same, and their weights are NaN.
    left = tl.where(inside, tl.where(shares == shares, shares, 0.0), -1.0)
    weights = tl.zeros([RANKS_BLOCK], tl.float32)
    chosen = tl.zeros([RANKS_BLOCK], tl.int32)
    for rank in tl.static_range(PER_TOKEN):
        _, best = tl.max(left, 0, return_indices=True)
        weights = tl.where(slot == rank, tl.sum(tl.where(expert == best, shares, 0.0), 0), weights)
        chosen = tl.where(slot == rank, best, chosen)
        left = tl.where(expert == best, -1.0, left)
    if NORMALISES:
        weights = tl.div_rn(weights, tl.zeros([RANKS_BLOCK], tl.float32) + tl.sum(weights, 0))
    place = token * PER_TOKEN + slot
    tl.store(weights_ptr + place, weights, mask=slot < PER_TOKEN)
    tl.store(chosen_ptr + place, chosen, mask=slot < PER_TOKEN)


def _routing(experts: int, per_token: int) -> LaunchConfig:
    return LaunchConfig(
        f"moe, {per_token} of {experts} experts",
        moe_route_kernel,
        {
            "logits_ptr": "*bf16", "weights_ptr": "*fp32", "chosen_ptr": "*i32", "logits_stride": "i32",
            "experts": "i32",
        },
        {
            "PER_TOKEN": per_token, "NORMALISES": True, "BLOCK": triton.next_power_of_2(experts),
            "RANKS_BLOCK": triton.next_power_of_2(per_token),
        },
        warps=_WARPS,
        aligned=frozenset({"logits_stride", "experts"} if experts % 16 == 0 else ()),
        min_blocks=16,
    )  # fmt: skip


LAUNCH_CONFIGS = (
    _routing(8, 2),
    _routing(128, 8),
    grouped_linear_launch_config("moe, gates and ups: 16 rows", 16, 1 << 14, per_row=8),
    grouped_linear_launch_config("moe, gates and ups: 64 rows", 64, 1 << 14, per_row=8, min_blocks=1),
    grouped_linear_launch_config("moe, downs times weights: 16 rows", 16, 1 << 12, scaled=True),
    grouped_linear_launch_config("moe, downs times weights: 64 rows", 64, 1 << 12, scaled=True, min_blocks=1),
)
