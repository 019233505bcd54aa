"""FP8 quantization, alone and fused with a norm or an activation, equals the ops in sequence."""

from typing import Any

import pytest
import torch

from quire_kernels.activation.silu_mul_fp8 import silu_mul_fp8_reference
from quire_kernels.activation.silu_mul_fp8_triton import silu_mul_fp8_triton
from quire_kernels.norm.add_rmsnorm_fp8 import add_rmsnorm_fp8_reference
from quire_kernels.norm.add_rmsnorm_fp8_triton import add_rmsnorm_fp8_triton
from quire_kernels.quantization.fp8_quantize import Quantized, fp8_quantize_reference
from quire_kernels.quantization.fp8_quantize_triton import fp8_quantize_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import rows
from tests.kernels.gpu.tolerances import assert_near

FACTORS: dict[str, Any] = {
    "tokens": [5, 1, 123, 257, 0],
    "size": [123, 1, 5, 257, 576],
    "op": ["alone", "norm", "norm of a sum", "activation"],
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "weight": ["as x", torch.float32],
    "apart": [0, 7],
}


def places(tokens: int, size: int, device: str) -> Quantized:
    """Output tensors that are slices of wider ones, filled with other values."""
    values = torch.full((tokens, size + 3), 7.0, device=device).to(torch.float8_e4m3fn)[:, :size]
    return values, torch.full((tokens, 2), 7.0, device=device)[:, :1]


def assert_same(given: Quantized, expected: Quantized, steps: int) -> None:
    """``steps``: FP8 steps that a difference in the last bit before the rounding may make."""
    assert given[0].dtype == torch.float8_e4m3fn and given[1].shape == (given[0].shape[0], 1)
    torch.testing.assert_close(given[1], expected[1], rtol=1e-6 if steps == 0 else 8e-3, atol=0)
    ours, theirs = (values.view(torch.uint8).int() for values in (given[0], expected[0]))
    assert ((ours - theirs).abs() <= steps).all() and (ours != theirs).sum() <= 1 + 0.02 * ours.numel()
    assert_near(*(values.float() * scales for values, scales in (given, expected)), rms=1e-2, largest=4e-2)


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_the_two_ops_in_sequence(case: dict[str, Any], device: str) -> None:
    tokens, size, dtype, apart, op = (case[name] for name in ("tokens", "size", "dtype", "apart", "op"))
    x = rows(tokens, 2 * size if op == "activation" else size, dtype, apart, device)
    out = places(tokens, size, device)
    if op == "alone":
        expected, given = fp8_quantize_reference(x), fp8_quantize_triton(x, out=out)
    elif op == "activation":
        expected, given = silu_mul_fp8_reference(x), silu_mul_fp8_triton(x, out=out)
    else:
        ours = rows(tokens, size, dtype, apart, device) if op == "norm of a sum" else None
        theirs = None if ours is None else ours.clone()
        weight = torch.randn(size, device=device).to(dtype if case["weight"] == "as x" else case["weight"])
        expected = add_rmsnorm_fp8_reference(x.clone(), theirs, weight, 1e-5)
        given = add_rmsnorm_fp8_triton(x, ours, weight, 1e-5, out=out)
        assert ours is None or torch.equal(ours, theirs)
    assert given[0] is out[0]
    assert_same(given, expected, 0 if op == "alone" else 1)


def test_a_row_is_scaled_by_its_largest_magnitude_and_zeros_stay_zeros(device: str) -> None:
    x = rows(5, 123, torch.bfloat16, 3, device)
    x[0] = 0
    values, scales = fp8_quantize_triton(x)
    assert (given := values.float() * scales)[0].count_nonzero() == 0
    # Half a step of the three mantissa bits, or half of the smallest step of the row.
    bound = (x.float().abs() / 16).clamp(min=scales * 2.0**-10 * 1.01)
    assert ((given - x.float()).abs() <= bound).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_make_only_their_row_nan(bad: float, device: str) -> None:
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


def test_a_row_of_subnormal_numbers_stays_finite(device: str) -> None:
    x = torch.full((1, 20), 1e-44, device=device)
    for values, scales in (fp8_quantize_triton(x), fp8_quantize_reference(x)):
        assert (values.float() * scales).isfinite().all()


def test_outputs_that_do_not_fit_are_refused(device: str) -> None:
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
