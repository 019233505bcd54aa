"""Weights that stream from the host give what weights that stay give. The device pretends: what was asked to
arrive is not a number until somebody waits for it, and what a buffer held is gone as soon as another copy to
it was asked for.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire_server.core.errors import ConfigError
from quire_server.core.request import Request
from quire_server.core.step import OUT_OF_MEMORY
from quire_server.models.decoder import Decoder
from quire_server.runner.grammars import Grammars
from quire_server.runner.model_runner import ModelRunner, RunnerOptions
from quire_server.runner.parts import assemble
from quire_server.runner.weight_stream import WeightStream
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import families
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pretend_device import PretendDevice
from tests.server.runner.test_device_runner import play
from tests.server.runner.test_model_runner import PROMPTS
from tests.server.runner.test_quantized_parity import tiny_llama

ALL = 1.0  # GiB: all layers of these models
OPTIONS = RunnerOptions(dtype="float32", max_num_seqs=16, max_model_len=128)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    families.build(path, "Llama", {"num_hidden_layers": 5, "attention_bias": True})
    return path


def on(device: PretendDevice, directory: Path, gb: float, **options: object) -> ModelRunner:
    chosen = replace(OPTIONS, cpu_offload_gb=gb, **options)  # type: ignore[arg-type]  # mixed values
    parts = assemble(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(lambda captured, wanted: pytest.fail("steps with weights on their way are not captured"))
    return runner


def one_layer(directory: Path) -> float:
    """GiB."""
    parts = assemble(directory, replace(OPTIONS, enforce_eager=True), lambda *_: None, PretendDevice())
    return sum(w.nbytes for one in parts.model.layers[0].linears for w in one.weights()) / (1 << 30)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_answers_are_those_of_weights_that_stay(directory: Path, layers: int) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:8])]
    expected, _ = play(load(directory), requests)
    device = PretendDevice()
    runner = on(device, directory, one_layer(directory) * (layers + 0.5))
    device.log.clear()
    assert play(runner, requests, max_num_batched_tokens=20)[0] == expected
    assert device.log.count("arrive") % layers == 0


def test_while_a_layer_is_computed_the_next_one_is_on_its_way(directory: Path) -> None:
    device = PretendDevice()
    runner = on(device, directory, ALL)
    device.log.clear()
    InProcessEngine(runner).generate([[5, 6, 7]], greedy(3))
    moves = [event for event in device.log if event in ("copy", "arrive")]
    steps = 3
    # One is there and another one under way before the first; then each that is done with asks for a third.
    assert moves == ["arrive", "copy"] * 5 * steps


@pytest.mark.parametrize(
    "name", ["Mixtral, one kv head", "Qwen 3 MoE, one dense layer", "Gemma 2, soft caps, local layers"]
)
def test_experts_and_norms_of_every_kind_too(name: str, tmp_path: Path) -> None:
    families.make(tmp_path, name)
    runner = on(PretendDevice(), tmp_path, ALL)
    expected = InProcessEngine(load(tmp_path)).generate(PROMPTS[:3], greedy(5))
    assert InProcessEngine(runner).generate(PROMPTS[:3], greedy(5)) == expected


@pytest.mark.parametrize("scheme", ["int4 w4a16", "fp8 by channel", "int8 w8a8", "fp8 by block"])
def test_stored_weights_stream_as_they_are_stored(scheme: str, tmp_path: Path) -> None:
    compressed.write(tiny_llama(tmp_path / "float", num_hidden_layers=4), tmp_path / "model", scheme)
    stays = on_eager(PretendDevice(), tmp_path / "model")
    streams = on(PretendDevice(), tmp_path / "model", ALL, dtype="bfloat16")
    for prompt in PROMPTS[:3]:
        given = [InProcessEngine(runner).generate([prompt], greedy(5)) for runner in (streams, stays)]
        assert given[0] == given[1]


def on_eager(device: PretendDevice, directory: Path) -> ModelRunner:
    return on(device, directory, 0.0, dtype="bfloat16", enforce_eager=True)


def test_the_device_holds_two_layers_of_them_and_the_host_all(directory: Path) -> None:
    runner = on(PretendDevice(), directory, ALL)
    stream = runner._model.stream
    assert isinstance(stream, WeightStream)
    each = one_layer(directory) * (1 << 30)
    places = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for layer in runner._model.layers
        for one in layer.linears
        for weight in one.weights()
    }
    assert len(places) == 2 and all(size < 1.1 * each for size in places.values())
    assert 5 * each <= stream.host_bytes < 5.5 * each


def test_a_step_that_ended_in_the_middle_spoils_none_of_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:4])]
    expected, _ = play(load(directory), requests)
    runner = on(PretendDevice(), directory, ALL)
    layer = runner._model.layers[2]
    strikes: list[int] = []
    attend = layer.attention

    def hungry(qkv: torch.Tensor, *more: object) -> torch.Tensor:
        if len(qkv) > 60:
            strikes.append(len(qkv))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return attend(qkv, *more)

    monkeypatch.setattr(layer, "attention", hungry)
    late = [Request("long", tuple(3 + i % 200 for i in range(90)), greedy(6), 0.0)]
    tokens, last = play(runner, requests, late=late)
    assert strikes and last.pop("long").error == OUT_OF_MEMORY and tokens.pop("long") == []
    assert tokens == expected


def test_it_is_refused_where_it_saves_nothing(directory: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 5 layers, and saves nothing, .*: give at least 0"):
        on(PretendDevice(), directory, one_layer(directory) * 2.5)
    with pytest.raises(ConfigError, match="--cpu-offload-gb is for --device cuda"):
        load(directory, device="cpu", cpu_offload_gb=1.0)


def test_nothing_is_looked_for_where_all_weights_stay(directory: Path) -> None:
    device = PretendDevice()
    assert isinstance(on_eager(device, directory)._model, Decoder)
    assert "copy" not in device.log
