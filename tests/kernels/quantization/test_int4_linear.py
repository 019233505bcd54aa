import sys

import pytest
import torch

from quire_kernels import W4Weight, int4_linear, quantise_int4, repack_awq, repack_gptq, repack_int4
from quire_kernels.quantization.int4_linear import int4_linear_reference, pack_int4
from quire_kernels.quantization.w4a16_packing import pack_w4, w4_dequantize

#: Fewer rows and more than are computed at once, and outputs that fill no register.
SHAPES = [(0, 64, 48), (1, 32, 16), (3, 64, 16), (8, 576, 96), (13, 128, 80), (2, 96, 24)]
DTYPES = [torch.float32, torch.bfloat16]


def int4_values(out_size: int, in_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, zeros), the extremes of each among them."""
    group = 32
    values = torch.randint(16, (out_size, in_size)).to(torch.uint8)
    values[0], values[1] = 15, 0
    zeros = torch.randint(17, (out_size, in_size // group)).to(torch.uint8)
    zeros[:2, 0] = torch.tensor([0, 16])
    return values, (torch.rand(out_size, in_size // group) + 0.01).half(), zeros


@pytest.fixture(params=["by the kernels", "without the kernels"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, each_isa: None) -> None:
    if request.param == "without the kernels":
        # By the module: the package exports a function of the same name.
        monkeypatch.setattr(sys.modules["quire_kernels.quantization.int4_linear"], "NATIVE", None)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("rows", "in_size", "out_size"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_it_is_bitwise_equal_to_its_reference(
    rows: int, in_size: int, out_size: int, dtype: torch.dtype, with_zeros: bool
) -> None:
    values, scales, zeros = int4_values(out_size, in_size)
    x = torch.randn(rows, in_size).to(dtype)
    bias = torch.randn(out_size) if with_zeros else None
    given = zeros if with_zeros else None
    result = int4_linear(x, pack_int4(values, scales, given), bias)
    assert result.dtype == dtype
    assert torch.equal(result, int4_linear_reference(x, values, scales, given, bias))


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_of_a_group_are_exact(sign: int) -> None:
    values = torch.full((16, 64), 15, dtype=torch.uint8)
    scales, zeros = torch.ones(16, 2), torch.zeros(16, 2, dtype=torch.uint8)
    result = int4_linear(torch.full((5, 64), sign * 127.0), pack_int4(values, scales, zeros), None)
    assert (result == sign * 127 * 15 * 64).all()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    weight = quantise_int4(torch.randn(96, 64))
    x = torch.randn(21, 64).to(dtype)
    x[7] *= 1000  # a row that would dominate a scale of the whole batch
    together = int4_linear(x, weight, None)
    for row in range(21):
        assert torch.equal(int4_linear(x[row : row + 1], weight, None)[0], together[row])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_affect_only_their_row(poison: float) -> None:
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    x[2, 5] = weight[3, 40] = poison
    result = int4_linear(x, quantise_int4(weight), None)
    assert result[2].isnan().all() and result[:, 3].isnan().all()
    rest = torch.arange(32) != 3
    assert result[[0, 1, 3]][:, rest].isfinite().all()


@pytest.mark.usefixtures("either_way")
def test_zeros_stay_zeros() -> None:
    weight, x = torch.randn(32, 64), torch.randn(3, 64)
    weight[3], x[1] = 0, 0
    result = int4_linear(x, quantise_int4(weight), None)
    assert (result[1] == 0).all() and (result[:, 3] == 0).all() and result.isfinite().all()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("weight", [1e-45, 1e-40, 2e-39, 1e-38, 1e-36])
def test_weights_whose_inverse_is_no_number_are_zeros(weight: float) -> None:
    weights = torch.randn(32, 64)
    weights[3], weights[5, :32] = torch.tensor(32 * [weight, 0.0]), -weight
    result = int4_linear(torch.randn(3, 64), quantise_int4(weights), None)
    assert result.isfinite().all() and (result[:, 5].abs() > 0.01).any()
    assert (result[:, 3].abs() < 1e-30).all()


@pytest.mark.usefixtures("either_way")
def test_weights_on_a_grid_of_16_numbers_are_kept_and_others_lose_less_than_by_the_nearest() -> None:
    x = torch.randint(-127, 128, (4, 128)).float()
    x[:, ::32] = 127  # whole numbers of which none is rounded
    grid = torch.randint(-8, 8, (48, 128)).float()
    grid[:, ::32] = -8
    result = int4_linear(x, quantise_int4(grid / 64), None)
    torch.testing.assert_close(result, x @ grid.T / 64, rtol=1e-6, atol=1e-4)
    weight = torch.randn(48, 128)
    peaks = weight.view(48, 4, 32).abs().amax(-1, keepdim=True) / 7
    nearest = (torch.round(weight.view(48, 4, 32) / peaks) * peaks).view(48, 128)
    ours = int4_linear(torch.eye(128) * 127, quantise_int4(weight), None).T / 127
    assert (ours - weight).square().mean() < 0.9 * (nearest - weight).square().mean()


def repacked(form: str, in_size: int, out_size: int, group: int) -> W4Weight:
    """Random words in the layout of a checkpoint."""
    words = torch.randint(-(1 << 31), 1 << 31, (in_size // 8 * out_size,), dtype=torch.int64).to(torch.int32)
    zeros = torch.randint(0, 1 << 31, (in_size // group, out_size // 8), dtype=torch.int64).to(torch.int32)
    scales = (torch.rand(in_size // group, out_size) / 100 + 1e-4).half()
    if form == "awq":
        return repack_awq(words.view(in_size, -1), zeros, scales)
    return repack_gptq(words.view(-1, out_size), zeros, scales, torch.arange(in_size) // group, 1)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("form", ["awq", "gptq"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_stored_integers_and_scales_are_multiplied_as_they_are(form: str, group: int) -> None:
    parts = [repacked(form, 256, outputs, group) for outputs in (48, 16)]
    x = torch.randint(-127, 128, (3, 256)).float()
    x[:, ::32] = 127  # whole numbers of which none is rounded
    exact = x.double() @ torch.cat([w4_dequantize(part) for part in parts], 1).double()
    torch.testing.assert_close(int4_linear(x, repack_int4(parts), None).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("magnitude", [1e-20, 1e-6, 1e6])
def test_scales_beyond_the_range_of_float16_are_kept(magnitude: float) -> None:
    values, scales, zeros = int4_values(32, 64)
    x, of_one = torch.eye(64) * 127, pack_w4(values.T, zeros.T, scales.T.float() * magnitude)
    result = int4_linear(x, repack_int4([of_one]), None) / 127
    torch.testing.assert_close(result, w4_dequantize(of_one), rtol=2e-3, atol=0)
