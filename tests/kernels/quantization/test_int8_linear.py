import sys

import pytest
import torch

from quire_kernels import int8_linear, quantise_int8
from quire_kernels.quantization.int8_linear import int8_linear_reference, pack_int8, quantise_groups

SHAPES = [(0, 64, 48), (1, 64, 48), (3, 64, 16), (8, 576, 960), (19, 128, 80)]
DTYPES = [torch.float32, torch.bfloat16]


def int8_values(out_size: int, in_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-128, 128, (out_size, in_size)).to(torch.int8), torch.rand(out_size) + 0.01


@pytest.fixture(params=["by the kernels", "without the kernels"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, each_isa: None) -> None:
    if request.param == "without the kernels":
        # By the module: the package exports a function of the same name.
        monkeypatch.setattr(sys.modules["quire_kernels.quantization.int8_linear"], "NATIVE", None)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("rows", "in_size", "out_size"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_bitwise_equal_to_its_reference(
    rows: int, in_size: int, out_size: int, dtype: torch.dtype, biased: bool
) -> None:
    values, scales = int8_values(out_size, in_size)
    x = torch.randn(rows, in_size).to(dtype)
    bias = torch.randn(out_size) if biased else None
    result = int8_linear(x, pack_int8(values, scales), bias)
    assert result.dtype == dtype
    assert torch.equal(result, int8_linear_reference(x, values, scales, bias))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    weight = quantise_int8(torch.randn(96, 64))
    x = torch.randn(21, 64).to(dtype)
    x[7] *= 1000  # a row that would dominate a scale of the whole batch
    together = int8_linear(x, weight, None)
    for row in range(21):
        assert torch.equal(int8_linear(x[row : row + 1], weight, None)[0], together[row])


@pytest.mark.usefixtures("either_way")
def test_shapes_that_do_not_fill_registers_are_supported() -> None:
    weight, x = torch.randn(37, 52), torch.randn(5, 52)
    exact = x @ weight.T
    assert (int8_linear(x, quantise_int8(weight), None) - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_affect_only_their_row(poison: float) -> None:
    x = torch.randn(4, 64)
    x[2, 5] = poison
    result = int8_linear(x, quantise_int8(torch.randn(32, 64)), None)
    assert result[2].isnan().all() and result[[0, 1, 3]].isfinite().all()


@pytest.mark.usefixtures("either_way")
def test_zeros_stay_zeros() -> None:
    weight = torch.randn(32, 64)
    weight[3] = 0
    x = torch.randn(3, 64)
    x[1] = 0
    result = int8_linear(x, quantise_int8(weight), None)
    assert (result[1] == 0).all() and (result[:, 3] == 0).all() and result.isfinite().all()


def test_an_outlier_costs_precision_in_its_own_group_only() -> None:
    x = torch.randn(6, 128)
    x[:, 3] = 1000
    values, scales = quantise_groups(x)
    assert values.abs().amax(dim=-1).tolist() == [[127] * 6] * 2
    errors = (values * scales - x.view(6, 2, 64).transpose(0, 1)).abs()
    assert (errors <= scales / 2 * 1.001).all() and errors[1].max() < 0.02
