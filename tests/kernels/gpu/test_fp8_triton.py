"""Rows in float8, alone and behind a norm or an activation: what the ops would give one after the other."""

import pytest
import torch
from torch import Tensor

from quire_kernels.add_rmsnorm_fp8 import add_rmsnorm_fp8_reference
from quire_kernels.add_rmsnorm_fp8_triton import add_rmsnorm_fp8_triton
from quire_kernels.fp8_quantize import Quantized, fp8_quantize_reference
from quire_kernels.fp8_quantize_triton import fp8_quantize_triton
from quire_kernels.silu_mul_fp8 import silu_mul_fp8_reference
from quire_kernels.silu_mul_fp8_triton import silu_mul_fp8_triton
from tests.kernels.gpu.closeness import assert_near

# tokens, size, dtype, type of the norm's weight, elements around a row
CASES = [
    (1, 576, torch.bfloat16, torch.bfloat16, 0),
    (5, 123, torch.float32, torch.float32, 5),
    pytest.param(123, 5, torch.bfloat16, torch.float32, 3, marks=pytest.mark.kernels),
    (17, 1, torch.float16, torch.float16, 0),
    pytest.param(257, 1, torch.float16, torch.float16, 0, marks=pytest.mark.kernels),
    (5, 257, torch.bfloat16, torch.bfloat16, 7),
    (5, 2049, torch.float32, torch.float32, 0),
]


def rows(tokens: int, size: int, dtype: torch.dtype, apart: int, device: str) -> Tensor:
    return (torch.randn(tokens, size + apart, device=device) * 3).to(dtype)[:, apart:]


def places(tokens: int, size: int, device: str) -> Quantized:
    """Parts of wider ones, full of something else."""
    values = torch.full((tokens, size + 3), 7.0, device=device).to(torch.float8_e4m3fn)[:, :size]
    return values, torch.full((tokens, 2), 7.0, device=device)[:, :1]


def assert_same(given: Quantized, expected: Quantized, steps: int) -> None:
    """``steps``: of a float8 that a last bit before the rounding may make."""
    assert given[0].dtype == torch.float8_e4m3fn and given[1].shape == (given[0].shape[0], 1)
    torch.testing.assert_close(given[1], expected[1], rtol=1e-6 if steps == 0 else 8e-3, atol=0)
    ours, theirs = (values.view(torch.uint8).int() for values in (given[0], expected[0]))
    assert (ours - theirs).abs().max() <= steps and (ours != theirs).float().mean() <= 0.02 * steps
    assert_near(*(values.float() * scales for values, scales in (given, expected)), rms=1e-2, largest=4e-2)


@pytest.mark.parametrize(("tokens", "size", "dtype", "_", "apart"), CASES)
def test_a_row_is_scaled_by_its_largest(
    tokens: int, size: int, dtype: torch.dtype, _: object, apart: int, device: str
) -> None:
    x = rows(tokens, size, dtype, apart, device)
    x[0] = 0
    expected = fp8_quantize_reference(x)
    assert_same(fp8_quantize_triton(x), expected, 0)
    out = places(tokens, size, device)
    fp8_quantize_triton(x, out=out)
    assert_same(out, expected, 0)
    assert (given := out[0].float() * out[1])[0].count_nonzero() == 0
    # Half of the last of three bits of an element, or half of the least step of the row.
    bound = (x.float().abs() / 16).clamp(min=out[1] * 2.0**-10 * 1.01)
    assert ((given - x.float()).abs() <= bound).all()


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("tokens", "size", "dtype", "weight_dtype", "apart"), CASES)
def test_norm_and_rounding_are_one(
    tokens: int, size: int, dtype: torch.dtype, weight_dtype: torch.dtype, apart: int, has_residual: bool,
    device: str,
) -> None:  # fmt: skip
    x = rows(tokens, size, dtype, apart, device)
    ours = rows(tokens, size, dtype, apart, device) if has_residual else None
    theirs = None if ours is None else ours.clone()
    weight = torch.randn(size, device=device).to(weight_dtype)
    expected = add_rmsnorm_fp8_reference(x.clone(), theirs, weight, 1e-5)
    out = places(tokens, size, device)
    assert add_rmsnorm_fp8_triton(x, ours, weight, 1e-5, out=out)[0] is out[0]
    assert_same(out, expected, 1)
    assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize(("tokens", "size", "dtype", "_", "apart"), CASES)
def test_activation_and_rounding_are_one(
    tokens: int, size: int, dtype: torch.dtype, _: object, apart: int, device: str
) -> None:
    gate_up = rows(tokens, 2 * size, dtype, apart, device)
    expected = silu_mul_fp8_reference(gate_up)
    assert_same(silu_mul_fp8_triton(gate_up), expected, 1)
    out = places(tokens, size, device)
    silu_mul_fp8_triton(gate_up, out=out)
    assert_same(out, expected, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_its_row_not_a_number_and_no_other(bad: float, device: str) -> None:
    x = torch.randn(3, 70, device=device)
    x[1, 69] = bad
    for op in (fp8_quantize_triton, fp8_quantize_reference):
        values, scales = op(x)
        given = values.float() * scales
        assert given[1].isnan().all() and given[::2].isfinite().all()
    gate_up = torch.cat((torch.ones_like(x), x), dim=1)
    values, scales = silu_mul_fp8_triton(gate_up)
    assert scales[1].isnan() and scales[::2].isfinite().all()
    values, scales = add_rmsnorm_fp8_triton(x, None, torch.ones(70, device=device), 1e-5)
    assert scales[1].isnan() and scales[::2].isfinite().all()


def test_a_row_of_the_smallest_numbers_is_kept_finite(device: str) -> None:
    x = torch.full((1, 20), 1e-44, device=device)
    for values, scales in (fp8_quantize_triton(x), fp8_quantize_reference(x)):
        assert (values.float() * scales).isfinite().all()


def test_places_that_do_not_fit_are_refused(device: str) -> None:
    x = torch.randn(4, 8, device=device)
    values, scales = places(4, 8, device)
    with pytest.raises(ValueError, match=r"values must be float8_e4m3fn \[4, 8\]"):
        fp8_quantize_triton(x, out=(values[:, :7], scales))
    with pytest.raises(ValueError, match=r"scales must be float32 \[4, 1\]"):
        fp8_quantize_triton(x, out=(values, scales[:, 0]))
    with pytest.raises(ValueError, match="weight must hold 8 adjacent"):
        add_rmsnorm_fp8_triton(x, None, torch.ones(7, device=device), 1e-5)
    with pytest.raises(ValueError, match="even number"):
        silu_mul_fp8_triton(x[:, :7])
