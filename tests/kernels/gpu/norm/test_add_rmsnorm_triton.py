"""The Triton kernel equals its reference for odd shapes and strided rows."""

from typing import Any

import pytest
import torch

from quire_kernels.norm.add_rmsnorm import add_rmsnorm_reference
from quire_kernels.norm.add_rmsnorm_triton import add_rmsnorm_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor, rows
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    "tokens": [5, 1, 123, 257, 0],
    "hidden": [123, 1, 5, 257, 576],
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "weight": ["as x", torch.float32],
    "has_residual": [False, True],
    "apart": [0, 7],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    tokens, hidden, dtype, apart = (case[name] for name in ("tokens", "hidden", "dtype", "apart"))
    x = rows(tokens, hidden, dtype, apart, device)
    residual = rows(tokens, hidden, dtype, apart, device) if case["has_residual"] else None
    weight = torch.randn(hidden, device=device).to(dtype if case["weight"] == "as x" else case["weight"])
    expected_residual = None if residual is None else residual.clone()
    expected = add_rmsnorm_reference(x.clone(), expected_residual, weight, 1e-5)
    whole, out = output_in_wider_tensor(x)
    given = add_rmsnorm_triton(x, residual, weight, 1e-5, out=out if case["has_out"] else None)
    assert_near(given, expected)
    assert is_surrounding_untouched(whole) and (given is out) == case["has_out"]
    if residual is not None:
        assert torch.equal(residual, expected_residual)


def test_nan_stays_in_its_row_and_out_may_be_x(device: str) -> None:
    x = torch.randn(3, 40, device=device)
    x[1, 7] = float("nan")
    expected = add_rmsnorm_reference(x.clone(), None, torch.ones(40, device=device), 1e-5)
    given = add_rmsnorm_triton(x, None, torch.ones(40, device=device), 1e-5, out=x)
    assert given is x
    assert_near(x, expected)
    assert x[1].isnan().all() and x[::2].isfinite().all()


def test_rows_of_non_contiguous_elements_are_refused(device: str) -> None:
    x = torch.randn(8, 4, device=device).T
    with pytest.raises(ValueError, match="x must hold 8 adjacent elements"):
        add_rmsnorm_triton(x, None, torch.ones(8, device=device), 1e-5)
