"""The Triton kernel gives what the reference gives, over odd shapes and rows that lie apart."""

import pytest
import torch
from torch import Tensor

from quire_kernels.add_rmsnorm import add_rmsnorm_reference
from quire_kernels.add_rmsnorm_triton import add_rmsnorm_triton
from tests.kernels.gpu.closeness import assert_near

CASES = [
    (1, 576, torch.bfloat16, torch.bfloat16),
    (5, 123, torch.bfloat16, torch.float32),
    (123, 1, torch.float32, torch.float32),
    (257, 5, torch.float16, torch.float16),
    (5, 257, torch.float32, torch.float32),
    (123, 64, torch.bfloat16, torch.bfloat16),
]


def rows(tokens: int, hidden: int, dtype: torch.dtype, device: str, *, apart: bool) -> Tensor:
    """Random rows; with ``apart`` a part of wider ones."""
    return torch.randn(tokens, hidden + 7 * apart, device=device).to(dtype)[:, 3 * apart :][:, :hidden]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("tokens", "hidden", "dtype", "weight_dtype"), CASES)
def test_it_equals_its_reference(
    tokens: int, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype, has_residual: bool, apart: bool,
    device: str,
) -> None:  # fmt: skip
    x = rows(tokens, hidden, dtype, device, apart=apart)
    residual = rows(tokens, hidden, dtype, device, apart=apart) if has_residual else None
    weight = torch.randn(hidden, device=device).to(weight_dtype)
    expected_residual = None if residual is None else residual.clone()
    expected = add_rmsnorm_reference(x.clone(), expected_residual, weight, 1e-5)
    assert_near(add_rmsnorm_triton(x, residual, weight, 1e-5), expected)
    if residual is not None:
        assert torch.equal(residual, expected_residual)


def test_what_is_not_a_number_stays_in_its_row_and_out_may_be_x(device: str) -> None:
    x = torch.randn(3, 40, device=device)
    x[1, 7] = float("nan")
    expected = add_rmsnorm_reference(x.clone(), None, torch.ones(40, device=device), 1e-5)
    given = add_rmsnorm_triton(x, None, torch.ones(40, device=device), 1e-5, out=x)
    assert given is x
    assert_near(x, expected)
    assert x[1].isnan().all() and x[::2].isfinite().all()


def test_elements_that_lie_apart_are_refused(device: str) -> None:
    x = torch.randn(8, 4, device=device).T
    with pytest.raises(ValueError, match="x must hold 8 adjacent elements"):
        add_rmsnorm_triton(x, None, torch.ones(8, device=device), 1e-5)
