"""Experts in Triton give what one token and expert at a time gives, and what the models' own blocks give."""

import pytest
import torch
from torch import Tensor

from quire_kernels.group_rows import group_rows_reference
from quire_kernels.group_rows_triton import group_rows_triton
from quire_kernels.moe import moe_reference, moe_route_reference
from quire_kernels.moe_triton import moe_route_triton, moe_triton
from tests.kernels.gpu.closeness import assert_near


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    ("count", "owners"),
    [
        (1, 1),
        (5, 3),
        (123, 8),
        (4099, 5),
        (9, 20),
        pytest.param(257, 128, marks=pytest.mark.kernels),
    ],
)
def test_rows_are_grouped_by_owner_in_their_order(count: int, owners: int, size: int, device: str) -> None:
    of = torch.randint(-1, owners, (count,), dtype=torch.int32, device=device)
    of[of == owners // 2] = 0  # somebody has none
    given, expected = group_rows_triton(of, owners, size), group_rows_reference(of, owners, size)
    assert torch.equal(given.owners, expected.owners)
    used = expected.owners >= 0
    assert torch.equal(given.rows[used], expected.rows[used])
    assert sorted(row for row in given.rows[used].flatten().tolist() if row < count) == [
        row for row, owner in enumerate(of.tolist()) if owner >= 0
    ]


def test_rows_of_nobody_and_no_rows_make_no_blocks(device: str) -> None:
    nobody = torch.full((20,), -1, dtype=torch.int32, device=device)
    assert (group_rows_triton(nobody, 4, 16).owners == -1).all()
    assert group_rows_triton(nobody[:0], 4, 16).owners.numel() == 0
    with pytest.raises(ValueError, match="must be int32"):
        group_rows_triton(nobody.long(), 4, 16)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "dtype"),
    [
        (1, 8, 2, torch.float32),
        (5, 128, 8, torch.bfloat16),
        (12, 5, 5, torch.float16),
        pytest.param(123, 5, 3, torch.float16, marks=pytest.mark.kernels),
        (7, 1, 1, torch.bfloat16),
    ],
)
def test_the_likeliest_are_chosen(
    tokens: int, experts: int, per_token: int, dtype: torch.dtype, normalises: bool, device: str
) -> None:
    logits = (torch.randn(tokens, experts + 3, device=device) * 3).to(dtype)[:, 3:]
    logits[0, experts // 2] = float("-inf") if experts > per_token else 0.0
    given = moe_route_triton(logits, per_token, normalises=normalises)
    expected = moe_route_reference(logits, per_token, normalises=normalises)
    assert torch.equal(given[1], expected[1])
    torch.testing.assert_close(given[0], expected[0], rtol=1e-5, atol=1e-7)


def test_logits_that_are_no_numbers_choose_experts_that_exist(device: str) -> None:
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


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "experts", "per_token", "dtype", "normalises"),
    [
        (1, 128, 64, 8, 2, torch.bfloat16, True),
        (5, 123, 37, 3, 1, torch.float32, False),
        (5, 64, 96, 16, 4, torch.float16, False),
        (37, 72, 40, 2, 2, torch.float32, True),  # tiles of 64 rows
        pytest.param(123, 136, 80, 4, 2, torch.bfloat16, True, marks=pytest.mark.kernels),
    ],
)
def test_it_equals_one_token_and_expert_at_a_time(
    tokens: int, hidden: int, inner: int, experts: int, per_token: int, dtype: torch.dtype, normalises: bool,
    device: str,
) -> None:  # fmt: skip
    x, logits, gate_up, down = layer(tokens, hidden, inner, experts, dtype, device)
    expected = moe_reference(x, logits, gate_up, down, per_token, normalises=normalises)
    given = moe_triton(x, logits, gate_up, down, per_token, normalises=normalises)
    assert_near(given, expected, largest=2e-5 if dtype == torch.float32 else 8e-3)
    out = torch.full((tokens, hidden + 5), 9.0, dtype=dtype, device=device)
    moe_triton(x, logits, gate_up, down, per_token, normalises=normalises, out=out[:, :hidden])
    assert torch.equal(out[:, :hidden], given) and (out[:, hidden:] == 9).all()


def test_a_tokens_result_does_not_depend_on_who_else_is_there(device: str) -> None:
    x, logits, gate_up, down = layer(6, 64, 32, 4, torch.bfloat16, device)
    whole = moe_triton(x, logits, gate_up, down, 2, normalises=True)
    x[3:] = float("nan")
    assert torch.equal(moe_triton(x, logits, gate_up, down, 2, normalises=True)[:3], whole[:3])


def test_experts_that_nobody_wants_are_not_read(device: str) -> None:
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
