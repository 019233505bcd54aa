"""W8A8: exact sums, rows independent of each other, an error close to that of the CPU's INT8."""

import pytest
import torch
from torch import Tensor

from quire_kernels.quantization.int8_linear import int8_linear_reference
from quire_kernels.quantization.w8a8 import w8a8, w8a8_reference


def layer(rows: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, scales, bias."""
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs).bfloat16()
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return x, weight, torch.rand(outputs) / 1000 + 1e-4, torch.randn(outputs).bfloat16()


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (136, 8), (4096, 24)])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 123])
def test_integers_are_summed_exactly_for_any_number_of_rows(rows: int, inputs: int, outputs: int) -> None:
    x, weight, scales, bias = layer(rows, inputs, outputs)
    for given in (bias, None):
        y = w8a8(x, weight, scales, given)
        assert y.dtype == torch.bfloat16 and y.shape == (rows, outputs)
        assert torch.equal(y, w8a8_reference(x, weight, scales, given))


def test_its_error_is_close_to_that_of_grouped_int8_on_a_cpu() -> None:
    x, weight, scales, bias = layer(40, 512, 64)
    dense = x.double() @ (weight.double() * scales[:, None]).T + bias.double()

    def error(y: Tensor) -> float:
        return float((y.double() - dense).square().mean().sqrt() / dense.std())

    by_group = error(int8_linear_reference(x, weight, scales, bias.float()))
    assert error(w8a8(x, weight, scales, bias)) < min(2 * by_group, 0.015)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_depends_on_no_other(bad: float) -> None:
    x, weight, scales, bias = layer(20, 64, 16)
    whole = w8a8(x, weight, scales, bias)
    assert torch.equal(w8a8(x[3:4], weight, scales, bias), whole[3:4])
    x[7, 5] = bad
    spoilt = w8a8(x, weight, scales, bias)
    assert not spoilt[7].isfinite().any()
    assert torch.equal(torch.cat((spoilt[:7], spoilt[8:])), torch.cat((whole[:7], whole[8:])))
