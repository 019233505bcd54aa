"""The Triton kernels of both gated activations equal their references."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_kernels.activation.gelu_tanh_mul import gelu_tanh_mul_reference
from quire_kernels.activation.gelu_tanh_mul_triton import gelu_tanh_mul_triton
from quire_kernels.activation.silu_mul import silu_mul_reference
from quire_kernels.activation.silu_mul_triton import silu_mul_triton
from tests.kernels.gpu.pairwise import cases
from tests.kernels.gpu.strided_tensors import is_surrounding_untouched, output_in_wider_tensor, rows
from tests.kernels.gpu.tolerances import assert_near

OPS: dict[str, Any] = {
    "silu": (silu_mul_triton, silu_mul_reference),
    "gelu": (gelu_tanh_mul_triton, gelu_tanh_mul_reference),
}
FACTORS: dict[str, Any] = {
    "tokens": [5, 1, 123, 257, 0],
    "size": [123, 1, 5, 257, 2049],
    "dtype": [torch.bfloat16, torch.float32, torch.float16],
    "op": list(OPS),
    "apart": [0, 6],
    "has_out": [False, True],
}


@pytest.mark.parametrize("case", cases(FACTORS), ids=str)
def test_it_equals_its_reference(case: dict[str, Any], device: str) -> None:
    tokens, size, dtype, apart = (case[name] for name in ("tokens", "size", "dtype", "apart"))
    op, reference = OPS[case["op"]]
    gate_up = rows(tokens, 2 * size, dtype, apart, device)
    expected = reference(gate_up)
    whole, out = output_in_wider_tensor(expected)
    given = op(gate_up, out=out if case["has_out"] else None)
    assert_near(given, expected)
    assert is_surrounding_untouched(whole) and (given is out) == case["has_out"]


@pytest.mark.parametrize(("op", "reference"), OPS.values(), ids=OPS)
def test_extremes_and_nan_stay_in_their_elements(
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
