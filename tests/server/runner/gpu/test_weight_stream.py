"""Streamed weights give the same results as resident weights, on a fake device that copies only when the
caller waits for the copy.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire_server.core.request import Request
from quire_server.core.step import OUT_OF_MEMORY
from quire_server.errors import ConfigError
from quire_server.models.decoder import Decoder
from quire_server.runner.gpu.weight_stream import WeightStream
from quire_server.runner.loader import load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import families
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.test_executor import outputs_of
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.test_model_runner import PROMPTS
from tests.server.runner.test_quantized_parity import tiny_llama

ALL = 1.0  # GiB: all layers of these models
OPTIONS = RunnerConfig(dtype="float32", max_num_seqs=16, max_model_len=128)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    families.build(path, "Llama", {"num_hidden_layers": 5, "attention_bias": True})
    return path


def gpu_runner(device: FakeDevice, directory: Path, gb: float, **options: object) -> ModelRunner:
    chosen = replace(OPTIONS, cpu_offload_gb=gb, **options)  # type: ignore[arg-type]  # mixed values
    parts = load_model(directory, chosen, lambda loaded, total: None, device)
    runner = ModelRunner(parts, chosen, Grammars(lambda: pytest.fail("no grammar is used")))
    runner.capture(
        lambda captured, wanted: wanted and pytest.fail("steps with weights on their way are not captured")
    )
    return runner


def one_layer(directory: Path) -> float:
    """GiB of one layer's weights."""
    parts = load_model(directory, replace(OPTIONS, enforce_eager=True), lambda *_: None, FakeDevice())
    return sum(w.nbytes for one in parts.model.layers[0].linears for w in one.weights()) / (1 << 30)


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_streamed_weights_give_the_same_answers(directory: Path, layers: int) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:8])]
    expected, _ = outputs_of(load(directory), requests)
    device = FakeDevice()
    runner = gpu_runner(device, directory, one_layer(directory) * (layers + 0.5))
    device.log.clear()
    assert outputs_of(runner, requests, max_num_batched_tokens=20)[0] == expected
    assert device.log.count("arrive") % layers == 0


def test_the_next_layer_is_copied_while_one_is_computed(directory: Path) -> None:
    device = FakeDevice()
    runner = gpu_runner(device, directory, ALL)
    device.log.clear()
    InProcessEngine(runner).generate([[5, 6, 7]], greedy(3))
    moves = [event for event in device.log if event in ("copy", "arrive")]
    steps = 3
    # Two layers are copied beforehand; each layer that was computed starts the copy of the next but one.
    assert moves == ["arrive", "copy"] * 5 * steps


@pytest.mark.parametrize(
    "name", ["Mixtral, one kv head", "Qwen 3 MoE, one dense layer", "Gemma 2, soft caps, local layers"]
)
def test_experts_and_norms_of_every_kind_too(name: str, tmp_path: Path) -> None:
    families.make(tmp_path, name)
    runner = gpu_runner(FakeDevice(), tmp_path, ALL)
    expected = InProcessEngine(load(tmp_path)).generate(PROMPTS[:3], greedy(5))
    assert InProcessEngine(runner).generate(PROMPTS[:3], greedy(5)) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["int4 w4a16", "fp8 by channel", "int8 w8a8", "fp8 by block"])
def test_quantised_weights_are_streamed_in_their_stored_form(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compressed.write(tiny_llama(tmp_path / "float", num_hidden_layers=4), tmp_path / "model", scheme)
    stays = eager_gpu_runner(FakeDevice(), tmp_path / "model")
    streams = gpu_runner(FakeDevice(), tmp_path / "model", ALL, dtype="bfloat16")
    for prompt in PROMPTS[:3]:
        given = [InProcessEngine(runner).generate([prompt], greedy(5)) for runner in (streams, stays)]
        assert given[0] == given[1]
    said = "weights are dequantised" in caplog.text
    assert said == (scheme == "fp8 by block"), "which takes twice the memory of the checkpoint"


def eager_gpu_runner(device: FakeDevice, directory: Path) -> ModelRunner:
    return gpu_runner(device, directory, 0.0, dtype="bfloat16", enforce_eager=True)


def test_the_device_holds_two_streamed_layers_and_the_host_all(directory: Path) -> None:
    runner = gpu_runner(FakeDevice(), directory, ALL)
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


def test_a_step_that_failed_midway_does_not_affect_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(str(i), tuple(prompt), greedy(6), 0.0) for i, prompt in enumerate(PROMPTS[:4])]
    expected, _ = outputs_of(load(directory), requests)
    runner = gpu_runner(FakeDevice(), directory, ALL)
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
    tokens, last = outputs_of(runner, requests, late=late)
    assert strikes and last.pop("long").error == OUT_OF_MEMORY and tokens.pop("long") == []
    assert tokens == expected


def test_it_is_refused_on_a_cpu(directory: Path) -> None:
    with pytest.raises(ConfigError, match="2 of 5 layers, and saves nothing, .*: give at least 0"):
        gpu_runner(FakeDevice(), directory, one_layer(directory) * 2.5)
    with pytest.raises(ConfigError, match="--cpu-offload-gb is for --device cuda"):
        load(directory, device="cpu", cpu_offload_gb=1.0)


def test_nothing_is_streamed_without_the_option(directory: Path) -> None:
    device = FakeDevice()
    assert isinstance(eager_gpu_runner(device, directory)._model, Decoder)
    assert "copy" not in device.log
