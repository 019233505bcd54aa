"""What each algorithm is for: less is lost than by rounding to the nearest, and folding loses nothing."""

from pathlib import Path

import pytest
import torch

from quire_server.layers.quantized.format import Rounded, pack, unpack
from quire_server.quantize import awq, folding, fp8, gptq, int8
from quire_server.quantize.block import Block
from quire_server.quantize.calibration import Calibration, cut
from quire_server.quantize.grid import Grid
from quire_server.quantize.source import Source
from quire_server.quantize.watched import Watched
from tests.server.models import settings
from tests.server.quantize import small_models

GROUP = 64


def watched(inputs: torch.Tensor, out_size: int = 48) -> Watched:
    """A matrix that has seen the inputs."""
    linear = Watched(["x"], inputs.shape[1], [out_size], bias=False, dtype=torch.float32, device="cpu")
    linear.weight.copy_(torch.randn(linear.weight.shape) / 8)
    linear.watch()
    linear(inputs)
    return linear


def block(*linears: Watched, dtype: torch.dtype = torch.float32) -> Block:
    return Block(linears, (), dtype, GROUP)


def weight(rounded: Rounded) -> torch.Tensor:
    codes = rounded.codes.float().unflatten(1, (rounded.scales.shape[1], -1))
    zeros = 0 if rounded.zeros is None else rounded.zeros[..., None]
    return ((codes - zeros) * rounded.scales[..., None]).flatten(1)


def to_the_nearest(linear: Watched) -> torch.Tensor:
    groups = linear.weight.unflatten(1, (-1, GROUP))
    return Grid.around(groups, block().stored).nearest(groups).flatten(1)


def correlated(count: int = 600, size: int = 128) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(count, size // 4) @ torch.randn(size // 4, size) + torch.randn(count, size) * 0.1


def lost(linear: Watched, rounded: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((inputs @ (rounded - linear.weight).T).square().mean())


def test_gptq_makes_good_what_each_column_loses_where_inputs_vary_together() -> None:
    inputs = correlated()
    linear = watched(inputs)
    made = weight(gptq.quantise(block(linear))[linear])
    assert lost(linear, made, inputs) < 0.5 * lost(linear, to_the_nearest(linear), inputs)


@pytest.mark.parametrize("algorithm", [fp8, int8])
def test_so_do_the_schemes_of_eight_bits(algorithm) -> None:
    inputs = correlated()
    linear, alone = watched(inputs), watched(torch.zeros(0, 128))
    alone.weight.copy_(linear.weight)
    made, nearest = (weight(algorithm.quantise(block(each))[each]) for each in (linear, alone))
    assert lost(linear, made, inputs) < 0.5 * lost(linear, nearest, inputs)


def test_an_expert_that_nobody_chose_is_rounded_all_the_same() -> None:
    linear = watched(torch.zeros(0, 128))
    nearest = (to_the_nearest(linear) - linear.weight).square().mean()
    for algorithm in (awq, gptq):
        made = weight(algorithm.quantise(block(linear))[linear])
        assert (made - linear.weight).square().mean() <= nearest


@pytest.mark.parametrize("algorithm", [awq, gptq])
def test_codes_fill_four_bits_and_scales_are_what_can_be_stored(algorithm) -> None:
    linear = watched(correlated())
    rounded = algorithm.quantise(block(linear, dtype=torch.bfloat16))[linear]
    for numbers in (rounded.codes, rounded.zeros):
        assert torch.equal(numbers, numbers.round())
    assert (rounded.codes.min(), rounded.codes.max()) == (0, 15)
    assert torch.equal(rounded.scales, rounded.scales.bfloat16().float())


@pytest.mark.parametrize(("algorithm", "error"), [(fp8, 1 / 16), (int8, 1 / 127)])
def test_eight_bits_are_off_by_no_more_than_half_a_step(algorithm, error: float) -> None:
    linear = watched(torch.zeros(0, 128))  # nothing to make good
    made = weight(algorithm.quantise(block(linear))[linear])
    peaks = linear.weight.abs().amax(1, keepdim=True)
    bound = linear.weight.abs() * error + peaks / 448 / 8 if algorithm is fp8 else peaks * error / 2
    assert bool(((made - linear.weight).abs() <= bound * 1.001).all())


def test_a_row_of_zeros_stays_one() -> None:
    linear = watched(correlated())
    linear.weight[5] = 0
    for algorithm in (awq, fp8, gptq, int8):
        assert not weight(algorithm.quantise(block(linear))[linear])[5].any()


@pytest.mark.parametrize("family", settings.FAMILIES)
def test_scaling_inputs_changes_nothing_but_where_numbers_are_large(family: str, tmp_path: Path) -> None:
    small_models.build(tmp_path, family)
    source = Source.open(tmp_path)
    torch.manual_seed(1)
    samples = [torch.randint(0, small_models.VOCAB, (40,)).tolist()]
    layer, scaled = source.layer(1), source.layer(1)
    replaced: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        folds = list(folding.folds(scaled, source.config, torch.float32, replaced))
        for fold in folds:
            before = fold.matrix.weight.clone()
            size = fold.maker.reduce(torch.ones(before.shape[1])).shape
            fold.apply(torch.rand(size) * 4 + 0.25)
            assert not torch.allclose(before, fold.matrix.weight)
        streams = []
        for each in (layer, scaled):
            text = Calibration(source, samples)
            text.advance(each)
            streams.append(text.streams[0])
    torch.testing.assert_close(*streams, atol=2e-4, rtol=1e-4)
    assert len(folds) >= 3 and replaced


def test_what_is_packed_is_what_is_unpacked() -> None:
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
