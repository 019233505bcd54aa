"""Both gated activations in Triton give what their references give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels.gelu_tanh_mul import gelu_tanh_mul_reference
from quire_kernels.gelu_tanh_mul_triton import gelu_tanh_mul_triton
from quire_kernels.silu_mul import silu_mul_reference
from quire_kernels.silu_mul_triton import silu_mul_triton
from tests.kernels.gpu.closeness import assert_near

OPS = [(silu_mul_triton, silu_mul_reference), (gelu_tanh_mul_triton, gelu_tanh_mul_reference)]
CASES = [
    (1, 1536, torch.bfloat16),
    (5, 123, torch.float32),
    (123, 5, torch.bfloat16),
    (257, 1, torch.float16),
    (5, 2049, torch.float32),
]


@pytest.mark.parametrize("apart", [0, 6])
@pytest.mark.parametrize(("tokens", "size", "dtype"), CASES)
@pytest.mark.parametrize(("op", "reference"), OPS)
def test_it_equals_its_reference(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], tokens: int, size: int, dtype: torch.dtype,
    apart: int, device: str,
) -> None:  # fmt: skip
    gate_up = (torch.randn(tokens, 2 * size + apart, device=device) * 4).to(dtype)[:, : 2 * size]
    expected = reference(gate_up)
    assert_near(op(gate_up), expected)
    out = torch.full((tokens, size + 3), 9.0, dtype=dtype, device=device)
    assert op(gate_up, out=out[:, :size]).data_ptr() == out.data_ptr()
    assert_near(out[:, :size], expected)
    assert (out[:, size:] == 9).all()


@pytest.mark.parametrize(("op", "reference"), OPS)
def test_extremes_and_what_is_not_a_number_stay_where_they_are(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], device: str
) -> None:
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, float("nan")]], device=device)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    given = op(gate_up)
    assert given[0, :5].isfinite().all() and given[0, 5].isnan()
    torch.testing.assert_close(given, reference(gate_up), equal_nan=True)


@pytest.mark.parametrize("op", [silu_mul_triton, gelu_tanh_mul_triton])
def test_shapes_that_do_not_fit_are_refused(op: Callable[..., Tensor], device: str) -> None:
    with pytest.raises(ValueError, match="gate_up must hold an even number"):
        op(torch.randn(2, 7, device=device))
    with pytest.raises(ValueError, match=r"out must be \[2, 4\]"):
        op(torch.randn(2, 8, device=device), out=torch.empty(2, 5, device=device))
