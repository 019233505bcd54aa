"""Each algorithm loses less than rounding to the nearest, and folding scales does not change the model."""

from pathlib import Path

import pytest
import torch

from quire_server.layers.linear import LinearShape
from quire_server.layers.quantized.format import Rounded, pack, unpack
from quire_server.quantize import awq, calibrated_layer, fp8, gptq, int8
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear
from quire_server.quantize.calibration import Calibration, cut
from quire_server.quantize.gptq import Grid
from quire_server.quantize.source_model import SourceModel
from tests.server.models import settings
from tests.server.quantize import small_models

GROUP = 64


def observed_linear(inputs: torch.Tensor, out_size: int = 48) -> ObservedLinear:
    """A matrix with recorded inputs."""
    place = torch.device("cpu")
    linear = ObservedLinear(LinearShape(["x"], inputs.shape[1], [out_size], False, torch.float32, place))
    linear.weight.copy_(torch.randn(linear.weight.shape) / 8)
    linear.watch()
    linear(inputs)
    return linear


def calibrated_layer_of(*linears: ObservedLinear, dtype: torch.dtype = torch.float32) -> CalibratedLayer:
    return CalibratedLayer(linears, (), dtype, GROUP)


def weight(rounded: Rounded) -> torch.Tensor:
    codes = rounded.codes.float().unflatten(1, (rounded.scales.shape[1], -1))
    zeros = 0 if rounded.zeros is None else rounded.zeros[..., None]
    return ((codes - zeros) * rounded.scales[..., None]).flatten(1)


def rounded_to_nearest(linear: ObservedLinear) -> torch.Tensor:
    groups = linear.weight.unflatten(1, (-1, GROUP))
    return Grid.around(groups, calibrated_layer_of().stored).nearest(groups).flatten(1)


def correlated_inputs(count: int = 600, size: int = 128) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(count, size // 4) @ torch.randn(size // 4, size) + torch.randn(count, size) * 0.1


def output_error(linear: ObservedLinear, rounded: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((inputs @ (rounded - linear.weight).T).square().mean())


def test_gptq_compensates_errors_if_inputs_are_correlated() -> None:
    inputs = correlated_inputs()
    linear = observed_linear(inputs)
    made = weight(gptq.quantise(calibrated_layer_of(linear))[linear])
    assert output_error(linear, made, inputs) < 0.5 * output_error(linear, rounded_to_nearest(linear), inputs)


def test_columns_with_large_inputs_are_rounded_first_and_codes_come_back_in_order() -> None:
    torch.manual_seed(4)
    inputs = torch.randn(600, 192)
    inputs[:, [70, 130]] *= torch.tensor([30.0, 10.0])
    linear = observed_linear(inputs)
    groups, seen = list[torch.Tensor](), linear.weight.unflatten(1, (-1, GROUP))

    def fit(columns: torch.Tensor, importance: torch.Tensor) -> Grid:
        groups.append(importance)
        return Grid.around(columns, calibrated_layer_of().stored)

    moments = torch.diag(linear.inputs.second.diagonal())  # uncorrelated: nothing is compensated
    codes, grids = gptq.compensated(linear.weight, moments, GROUP, fit)
    assert [float(importance.argmax()) for importance in groups] == [0, 0, 0]
    assert groups[0].max() > groups[1].max() > groups[2].max()
    nearest = Grid.around(seen, calibrated_layer_of().stored)
    assert torch.equal(codes, nearest.codes(seen).flatten(1))
    assert torch.equal(torch.cat([grid.scales for grid in grids], 1), nearest.scales[..., 0])


def test_coordinate_descent_lessens_the_error_that_compensation_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = correlated_inputs()
    linear = observed_linear(inputs)

    def error(rounds: int) -> float:
        monkeypatch.setattr(gptq, "_ROUNDS", rounds)
        made = weight(gptq.quantise(calibrated_layer_of(linear, dtype=torch.float16))[linear])
        return output_error(linear, made, inputs)

    assert error(2) < error(1) < 0.97 * error(0)


@pytest.mark.parametrize("algorithm", [fp8, int8])
def test_the_eight_bit_schemes_compensate_errors_too(algorithm) -> None:
    inputs = correlated_inputs()
    linear, alone = observed_linear(inputs), observed_linear(torch.zeros(0, 128))
    alone.weight.copy_(linear.weight)
    made, nearest = (weight(algorithm.quantise(calibrated_layer_of(each))[each]) for each in (linear, alone))
    assert output_error(linear, made, inputs) < 0.5 * output_error(linear, nearest, inputs)


def test_an_expert_without_inputs_is_rounded_too() -> None:
    linear = observed_linear(torch.zeros(0, 128))
    nearest = (rounded_to_nearest(linear) - linear.weight).square().mean()
    for algorithm in (awq, gptq):
        made = weight(algorithm.quantise(calibrated_layer_of(linear))[linear])
        assert (made - linear.weight).square().mean() <= nearest


@pytest.mark.parametrize("algorithm", [awq, gptq])
def test_codes_use_four_bits_and_scales_are_storable(algorithm) -> None:
    linear = observed_linear(correlated_inputs())
    rounded = algorithm.quantise(calibrated_layer_of(linear, dtype=torch.bfloat16))[linear]
    for numbers in (rounded.codes, rounded.zeros):
        assert torch.equal(numbers, numbers.round())
    assert (rounded.codes.min(), rounded.codes.max()) == (0, 15)
    assert torch.equal(rounded.scales, rounded.scales.bfloat16().float())


@pytest.mark.parametrize(("algorithm", "error"), [(fp8, 1 / 16), (int8, 1 / 127)])
def test_the_error_of_eight_bits_is_at_most_half_a_step(algorithm, error: float) -> None:
    linear = observed_linear(torch.zeros(0, 128))  # no inputs: nothing to compensate
    made = weight(algorithm.quantise(calibrated_layer_of(linear))[linear])
    peaks = linear.weight.abs().amax(1, keepdim=True)
    bound = linear.weight.abs() * error + peaks / 448 / 8 if algorithm is fp8 else peaks * error / 2
    assert bool(((made - linear.weight).abs() <= bound * 1.001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    linear = observed_linear(correlated_inputs())
    linear.weight[5] = 0
    for algorithm in (awq, fp8, gptq, int8):
        assert not weight(algorithm.quantise(calibrated_layer_of(linear))[linear])[5].any()


@pytest.mark.parametrize("family", settings.FAMILIES)
def test_folding_scales_does_not_change_the_layers_output(family: str, tmp_path: Path) -> None:
    small_models.build(tmp_path, family)
    source = SourceModel.open(tmp_path)
    torch.manual_seed(1)
    samples = [torch.randint(0, small_models.VOCAB, (40,)).tolist()]
    layer, scaled = source.layer(1), source.layer(1)
    replaced: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        folds = list(calibrated_layer.folds_of(scaled, source.config, torch.float32, replaced))
        for fold in folds:
            before = fold.matrix.weight.clone()
            size = fold.producer.reduce(torch.ones(before.shape[1])).shape
            fold.apply(torch.rand(size) * 4 + 0.25)
            assert not torch.allclose(before, fold.matrix.weight)
        streams = []
        for each in (layer, scaled):
            text = Calibration(source, samples)
            text.advance(each)
            streams.append(text.streams[0])
    torch.testing.assert_close(*streams, atol=2e-4, rtol=1e-4)
    assert len(folds) >= 3 and replaced


def test_unpacking_reverses_packing() -> None:
    torch.manual_seed(0)
    values = torch.randint(0, 16, (3, 24))
    assert torch.equal(unpack(pack(values, 4), 4), values.int())
    assert torch.equal(unpack(pack(values[:, :11], 4), 4)[:, :11], values[:, :11].int())


def test_samples_come_from_the_whole_text_and_are_no_longer_than_the_context() -> None:
    tokens = list(range(100_000))
    samples = cut(tokens, 8192)
    assert len(samples) == 128 and {len(sample) for sample in samples} == {512}
    assert samples[0][0] == 0 and samples[-1][-1] == tokens[-1]
    assert [len(sample) for sample in cut(tokens[:100], 50)] == [50, 50]
