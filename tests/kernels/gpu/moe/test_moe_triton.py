"""Mixture of experts in Triton equals its reference and the models' own blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.moe.group_rows import group_rows_reference
from quire_kernels.moe.group_rows_triton import group_rows_triton
from quire_kernels.moe.moe import moe_reference, moe_route_reference
from quire_kernels.moe.moe_triton import moe_route_triton, moe_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor, rows
from tests.kernels.gpu.tolerances import assert_near

GROUPS: dict[str, Any] = {
    "count": [123, 1, 5, 257, 4099, 0],
    "owners": [8, 1, 3, 20, 128],
    "size": [16, 64],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", cases(GROUPS), ids=str)
def test_rows_are_grouped_by_owner_in_their_order(case: dict[str, Any], device: str) -> None:
    count, owners, size = case["count"], case["owners"], case["size"]
    of = torch.randint(-1, owners, (count,), dtype=torch.int32, device=device)
    of[of == owners // 2] = 0  # an owner without rows
    given, expected = group_rows_triton(of, owners, size), group_rows_reference(of, owners, size)
    assert torch.equal(given.owners, expected.owners)
    used = expected.owners >= 0
    assert torch.equal(given.rows[used], expected.rows[used])
    assert sorted(row for row in given.rows[used].flatten().tolist() if row < count) == [
        row for row, owner in enumerate(of.tolist()) if owner >= 0
    ]


def test_rows_without_owner_and_empty_inputs_make_no_blocks(device: str) -> None:
    no_owner = torch.full((20,), -1, dtype=torch.int32, device=device)
    assert (group_rows_triton(no_owner, 4, 16).owners == -1).all()
    assert group_rows_triton(no_owner[:0], 4, 16).owners.numel() == 0
    with pytest.raises(ValueError, match="must be int32"):
        group_rows_triton(no_owner.long(), 4, 16)


ROUTES: dict[str, Any] = {
    "tokens": [5, 1, 123, 0],
    "experts": [(128, 8), (8, 2), (5, 5), (5, 3), (1, 1)],  # and experts per token
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "normalises": [False, True],
    "apart": [3, 0],
}


@pytest.mark.parametrize("case", cases(ROUTES), ids=str)
def test_routing_equals_its_reference(case: dict[str, Any], device: str) -> None:
    experts, per_token = case["experts"]
    logits = rows(case["tokens"], experts, case["dtype"], case["apart"], device)
    logits[:1, experts // 2] = float("-inf") if experts > per_token else 0.0
    given = moe_route_triton(logits, per_token, normalises=case["normalises"])
    expected = moe_route_reference(logits, per_token, normalises=case["normalises"])
    assert torch.equal(given[1], expected[1])
    torch.testing.assert_close(given[0], expected[0], rtol=1e-5, atol=1e-7)


def test_nan_logits_choose_valid_experts(device: str) -> None:
    logits = torch.randn(3, 5, device=device)
    logits[1, 2] = float("nan")
    weights, experts = moe_route_triton(logits, 3, normalises=True)
    assert weights[1].isnan().all() and weights[::2].isfinite().all()
    assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in experts.tolist())


def layer(
    tokens: int, hidden: int, inner: int, experts: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router_logits, gate_up, down."""
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, 8:]
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device=device) * inner**-0.5).to(dtype)
    return x, torch.randn(tokens, experts, device=device).to(dtype), gate_up, down


FACTORS: dict[str, Any] = {
    "tokens": [5, 1, 37, 123, 0],
    "hidden": [123, 1, 64, 257],
    "inner": [37, 1, 5, 96],
    "experts": [(3, 1), (8, 2), (16, 4), (2, 2)],  # two experts: tiles of 64 rows
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "normalises": [False, True],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_one_token_and_expert_at_a_time(case: dict[str, Any], device: str) -> None:
    (experts, per_token), dtype, normalises = case["experts"], case["dtype"], case["normalises"]
    arguments = layer(case["tokens"], case["hidden"], case["inner"], experts, dtype, device)
    expected = moe_reference(*arguments, per_token, normalises=normalises)
    whole, out = output_in_wider_tensor(expected)
    given = moe_triton(*arguments, per_token, normalises=normalises, out=out if case["has_out"] else None)
    assert_near(given, expected, largest=2e-5 if dtype == torch.float32 else 8e-3)
    assert is_surrounding_untouched(whole) and (given is out) == case["has_out"]


def test_a_tokens_result_does_not_depend_on_other_tokens(device: str) -> None:
    x, logits, gate_up, down = layer(6, 64, 32, 4, torch.bfloat16, device)
    whole = moe_triton(x, logits, gate_up, down, 2, normalises=True)
    x[3:] = float("nan")
    assert torch.equal(moe_triton(x, logits, gate_up, down, 2, normalises=True)[:3], whole[:3])


def test_unused_experts_are_not_read(device: str) -> None:
    x, logits, gate_up, down = layer(5, 40, 24, 4, torch.float32, device)
    logits[:, 2] = -100.0
    gate_up[2], down[2] = float("nan"), float("inf")
    expected = moe_reference(x, logits, gate_up, down, 2, normalises=True)
    given = moe_triton(x, logits, gate_up, down, 2, normalises=True)
    assert given.isfinite().all()
    assert_near(given, expected, largest=2e-5)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x, logits, gate_up, down = layer(2, 32, 16, 4, torch.float32, device)
    with pytest.raises(ValueError, match="do not fit"):
        moe_triton(x, logits[:1], gate_up, down, 2, normalises=True)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        moe_triton(x, logits, gate_up, down, 5, normalises=True)
    with pytest.raises(ValueError, match="of one dtype"):
        moe_triton(x.bfloat16(), logits, gate_up, down, 2, normalises=True)


def test_ranks_sum_their_own_experts_and_nothing_for_others(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, logits, gate_up, down = layer(9, 24, 16, 6, torch.float32, device)
    empty = torch.empty

    def poisoned(*size: int, **more: Any) -> Tensor:
        made = empty(*size, **more)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    parts = []
    for first in (0, 2):
        own = slice(first, first + 2 + first)  # two experts, then four
        given = moe_triton(x, logits, gate_up[own], down[own], 2, normalises=True, first=first)
        expected = moe_reference(x, logits, gate_up[own], down[own], 2, normalises=True, first=first)
        torch.testing.assert_close(given, expected)
        parts.append(given)
    whole = moe_reference(x, logits, gate_up, down, 2, normalises=True)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    with pytest.raises(ValueError, match="do not fit"):
        moe_triton(x, logits, gate_up[:3], down[:3], 2, normalises=True, first=4)
