import pytest
import torch

from quire_kernels.norm.add_rmsnorm import add_rmsnorm, add_rmsnorm_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_weight_wide", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_it_equals_its_reference_and_leaves_the_sum_in_the_residual(
    dtype: torch.dtype, with_residual: bool, is_weight_wide: bool
) -> None:
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in [(5, 96), (5, 96), (96,)])
    weight = weight.float() if is_weight_wide else weight
    ours, theirs = residual.clone(), residual.clone()
    result = add_rmsnorm(x, ours if with_residual else None, weight, 1e-5)
    expected = add_rmsnorm_reference(x, theirs if with_residual else None, weight, 1e-5)
    torch.testing.assert_close(result, expected)
    assert torch.equal(ours, theirs) and result.dtype == dtype
    assert torch.equal(ours, x + residual) if with_residual else torch.equal(ours, residual)
