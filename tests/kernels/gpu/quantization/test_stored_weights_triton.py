"""Quantized checkpoints, multiplied by the quantized kernels, equal dequantized ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.errors import ModelCorruptError
from quire_server.layers.linear import GpuLinear, LinearLayer, LinearShape
from quire_server.layers.quantized import linear
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.gpu_linear import QuantizedGpuLinear
from quire_server.layers.quantized.ignored_layers import IgnoredLayers
from quire_server.layers.quantized.linear import Quantization
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.scaled_8bit import FP8, INT8, Scaled
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.test_whole_model_triton import PROMPTS as SHORT
from tests.kernels.gpu.test_whole_model_triton import SAMPLING, answers, new_device, on_gpu
from tests.kernels.gpu.tolerances import assert_near
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.test_quantized_parity import PROMPTS, tiny_llama

INPUTS, OUTPUTS = 128, (64, 32, 32)
PREFIXES = ("q", "k", "v")
BY_CHANNEL, BY_TENSOR = (1, None), (None, None)
FORMATS: dict[str, WeightFormat] = {
    "awq": AWQ(64),
    "awq, one group": AWQ(None),
    "gptq": GPTQ(32),
    "gptq v2, act order": GPTQ(64, has_act_order=True, zero_offset=0),
    "packed": Packed(4, 64),
    "packed, zeros": Packed(4, 32, has_zeros=True),
    "int8": Scaled(INT8, BY_CHANNEL, rounds_inputs=True),
    "fp8 by channel": Scaled(FP8, BY_CHANNEL, rounds_inputs_to_fp8=True),
    "fp8 by tensor, static": Scaled(FP8, BY_TENSOR, activations=("input_scale",), rounds_inputs_to_fp8=True),
}
DENSE: dict[str, WeightFormat] = {
    "fp8 of which inputs are not rounded": Scaled(FP8, BY_CHANNEL),
    "fp8 by block": Scaled(FP8, (128, 128), rounds_inputs_to_fp8=True),
    "int8 of which inputs are not rounded": Scaled(INT8, BY_CHANNEL),
    "int8 by group": Scaled(INT8, (1, 32), rounds_inputs=True),
    "int8 with zeros": Scaled(INT8, BY_CHANNEL, rounds_inputs=True, has_zeros=True),
    "packed int8": Packed(8, 32),
    "groups of 16": Packed(4, 16),
}


def layer(weights: WeightFormat, device: str, dtype: torch.dtype = torch.bfloat16) -> LinearLayer:
    make = linear.factory(Quantization("test", weights, IgnoredLayers()), GpuLinear)
    made = make(LinearShape(PREFIXES, INPUTS, OUTPUTS, True, dtype, torch.device(device)))
    for name, target in made.targets().items():
        prefix, suffix = name.split(".")
        if suffix == "weight_shape":
            target.copy_(torch.tensor([OUTPUTS[PREFIXES.index(prefix)], INPUTS]))
        elif suffix == "g_idx":
            groups = torch.arange(INPUTS) // weights.group_size  # type: ignore[attr-defined]
            target.copy_(groups[torch.randperm(INPUTS)] if weights.has_act_order else groups)  # type: ignore[attr-defined]
        elif target.dtype == torch.int32:
            target.copy_(torch.randint(-(1 << 31), 1 << 31, target.shape))
        elif "scale" in suffix:
            target.copy_((torch.rand(target.shape) + 0.5).half())
        else:
            target.copy_((torch.randn(target.shape) * 20).clamp(-100, 100).to(target.dtype))
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_formats_with_a_kernel_are_not_dequantized(kind: str, rows: int, device: str) -> None:
    weights = FORMATS[kind]
    with as_cuda() as called:
        made = layer(weights, device)
        assert isinstance(made, QuantizedGpuLinear)
        tensors: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in PREFIXES}
        for name, tensor in made.targets().items():
            prefix, suffix = name.split(".")
            tensors[prefix][suffix] = tensor.clone()
        bias = torch.cat([tensors[prefix].pop("bias") for prefix in PREFIXES]).float()
        made.finish()
        x = torch.randn(rows, INPUTS, device=device).bfloat16()
        y = made(x)
    dense = torch.cat([weights.dequantize(prefix, tensors[prefix]) for prefix in PREFIXES])
    is_byte = isinstance(weights, Scaled)
    assert is_byte or "w4a16_triton" in called
    assert ("fp8_quantize_triton" in called) == (kind.startswith("fp8"))
    bound: dict[str, Any] = {"rms": 4e-2, "largest": 8e-2} if is_byte else {}
    assert_near(y, (x.float() @ dense.T + bias).bfloat16(), **bound)


@pytest.mark.parametrize("name", DENSE)
def test_formats_without_a_kernel_are_dequantized(name: str, device: str) -> None:
    assert not isinstance(layer(DENSE[name], device), QuantizedGpuLinear)


def test_float32_models_are_dequantized(device: str) -> None:
    assert not isinstance(layer(FORMATS["awq"], device, torch.float32), QuantizedGpuLinear)


def test_nan_scales_and_wrong_group_indices_are_reported(device: str) -> None:
    broken = layer(FORMATS["awq"], device)
    broken.targets()["k.scales"][0, 0] = float("nan")
    with pytest.raises(ModelCorruptError, match=r"k\.scales holds values that are not finite"):
        broken.finish()
    uneven = layer(FORMATS["gptq v2, act order"], device)
    uneven.targets()["v.g_idx"].fill_(0)
    with pytest.raises(ModelCorruptError, match="v: .*g_idx must name each"):
        uneven.finish()


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("scheme", "kernel", "near"),
    [
        ("int4 w4a16", "w4a16_triton", 0.03),
        ("fp8 by channel", "fp8_quantize_triton", 0.15),
        ("int8 w8a8", "silu_mul_triton", 0.1),
    ],
)
def test_a_checkpoint_uses_the_quantized_kernels(
    scheme: str, kernel: str, near: float, tmp_path: Path
) -> None:
    source = tiny_llama(tmp_path / "float")
    compressed.write(source, tmp_path / "model", scheme)
    found = []
    prompt = PROMPTS[1][:12]
    with as_cuda() as called:
        runner = on_gpu(
            tmp_path / "model", new_device(), lambda done, wanted: None, dtype="bfloat16", enforce_eager=True
        )
        called.clear()
        found.append(_first_logprobs(InProcessEngine(runner), prompt))
    assert kernel in called
    found.append(_first_logprobs(InProcessEngine(load(tmp_path / "model", device="cpu")), prompt))
    ours, dequantised = found
    assert (ours - dequantised).square().mean().sqrt() < near * dequantised.std()


@pytest.mark.kernels
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_fused_fp8_quantization_before_fp8_weights_changes_no_answer(is_eager: bool, tmp_path: Path) -> None:
    compressed.write(tiny_llama(tmp_path / "float"), tmp_path / "model", "fp8 by channel")
    settings: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": is_eager}
    with as_cuda() as called:
        runner = on_gpu(tmp_path / "model", new_device(), lambda done, wanted: None, **settings)
        called.clear()
        fused = answers(runner, SHORT, SAMPLING)
        kernels = list(called)
        (layer,) = runner._model.layers  # there is no public way to disable the fusion
        for linear in (layer.qkv, *layer.mlp.linears):
            linear.forward_fp8 = None  # type: ignore[attr-defined]
        called.clear()
        apart = answers(runner, SHORT, SAMPLING)
    assert fused == apart
    assert {"add_rmsnorm_fp8_triton", "silu_mul_fp8_triton"}.isdisjoint(called)
    count = {name: kernels.count(name) for name in kernels}
    steps = count["silu_mul_fp8_triton"]
    assert count["add_rmsnorm_fp8_triton"] == 2 * steps and "silu_mul_triton" not in count
    assert count["fp8_quantize_triton"] == count["add_rmsnorm_triton"] == steps, "attention's; the head"


def _first_logprobs(engine: InProcessEngine, prompt: list[int]) -> torch.Tensor:
    engine.generate([prompt], greedy(1, logprobs=211))
    (entry,) = engine.logprobs["0"]
    return torch.tensor([value for _, value in sorted(entry.top)])
