"""Mixture of experts: each token's weighted sum of its top-k experts (arXiv:1701.06538)."""

import torch
from torch import Tensor

from quire_kernels.activation.silu_mul import silu_mul_reference

if torch.cuda.is_available():
    from quire_kernels.moe.moe_triton import moe_triton


def moe(
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
    """x [T, H] -> [T, H]. ``router_logits`` [T, E]; ``gate_up`` [N, 2 I, H], gates first; ``down`` [N, H, I]:
    of experts ``first`` to ``first`` + N, of which the result is the sum; all E, or one rank's part of them.

    Routing: a softmax over all experts in float32, of which the ``per_token`` largest are used, the lower
    expert number first among equal ones. ``normalises``: their weights are divided by their sum.
    """
    if x.is_cuda:
        return moe_triton(
            x, router_logits, gate_up, down, per_token, normalises=normalises, first=first, out=out
        )
    return moe_reference(
        x, router_logits, gate_up, down, per_token, normalises=normalises, first=first, out=out
    )


def moe_reference(
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
    """One token and expert at a time, in float32, rounded after each linear layer."""
    weights, experts = moe_route_reference(router_logits, per_token, normalises=normalises)
    y = torch.zeros(x.shape, device=x.device)
    for token, chosen in enumerate(experts.tolist()):
        for rank, number in enumerate(chosen):
            if not 0 <= (expert := number - first) < len(down):
                continue
            inner = silu_mul_reference((x[token].float() @ gate_up[expert].float().T).to(x.dtype)[None])[0]
            part = weights[token, rank] * (inner.float() @ down[expert].float().T)
            y[token] += part.to(x.dtype)
    return y.to(x.dtype) if out is None else out.copy_(y)


def moe_route_reference(router_logits: Tensor, per_token: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
    """(weights f32 [T, per_token], experts i32 [T, per_token]), the largest weight first."""
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = order.values[:, :per_token], order.indices[:, :per_token]
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)
