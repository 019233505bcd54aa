"""int8 and int4 in the whole runner: when they are chosen, and that no answer depends on the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from quire_server.errors import ConfigError
from quire_server.layers.int4_linear import Int4Linear, make_int4_linear
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels, native_kernels
from quire_server.layers.linear import GpuLinear, Linear, LinearFactory, LinearShape
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.ignored_layers import IgnoredLayers
from quire_server.layers.quantized.linear import Quantization
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.scaled_8bit import FP8, INT8, Scaled
from quire_server.runner import loader, quantization
from tests.server.runner.in_process import InProcessEngine, greedy, load

PROMPTS = [[(7 * i + 13 * j) % 40000 + 50 for j in range(3 + 5 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def int8_runner(smollm2: Path):
    return load(smollm2, dtype="bfloat16", quantization="int8", max_model_len=256)


@pytest.fixture(scope="module")
def alone(int8_runner) -> list[list[int]]:
    return [InProcessEngine(int8_runner).generate([prompt], greedy(4))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("condition", [{}, {"num_blocks": 5, "max_model_len": 48}], ids=str)
def test_with_int8_each_prompt_gets_the_answer_that_it_gets_alone(
    int8_runner, alone: list[list[int]], condition: dict[str, object]
) -> None:
    assert InProcessEngine(int8_runner, **condition).generate(PROMPTS, greedy(4)) == alone


def test_with_int8_smollm2_still_knows_the_capital_of_france(smollm2: Path, int8_runner) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = InProcessEngine(int8_runner).generate([tokenizer.encode(prompt).ids], greedy(12))[0]
    assert "Paris" in tokenizer.decode(answer)


def test_with_int4_answers_do_not_depend_on_the_batch_and_smollm2_still_knows_the_capital(
    smollm2: Path,
) -> None:
    runner = load(smollm2, quantization="int4", max_model_len=256)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(question).ids, *PROMPTS[:2]]
    together = InProcessEngine(runner).generate(prompts, greedy(8))
    assert [InProcessEngine(runner).generate([prompt], greedy(8))[0] for prompt in prompts] == together
    assert "Paris" in tokenizer.decode(together[0])


def test_the_log_names_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_kernels() in ("avx512_vnni", "avx2", "none")
    monkeypatch.setattr("quire_server.layers.int8_linear.NATIVE", None)
    assert native_kernels() == "none"


@pytest.mark.parametrize(
    ("wanted", "dtype_is_auto", "stored", "has_kernels", "chosen"),
    [
        ("auto", True, "bfloat16", True, "int8"),
        ("auto", True, "bfloat16", False, "none"),
        ("auto", True, "float32", True, "none"),
        ("auto", False, "bfloat16", True, "none"),
        ("none", True, "bfloat16", True, "none"),
        ("int8", False, "float32", False, "int8"),
        ("int4", True, "bfloat16", True, "int4"),
        ("int4", False, "float32", False, "int4"),
    ],
)
def test_int8_is_never_chosen_when_a_dtype_is_named(
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    dtype_is_auto: bool,
    stored: str,
    has_kernels: bool,
    chosen: str,
) -> None:
    monkeypatch.setattr(quantization, "has_native_kernels", lambda: has_kernels)
    name, factory = quantization.choose(wanted, checkpoint=None, dtype_is_auto=dtype_is_auto, stored=stored)
    assert (name, factory) == (chosen, {"int8": Int8Linear, "int4": make_int4_linear, "none": Linear}[chosen])


@pytest.mark.parametrize(
    ("linear", "has_kernels", "wanted", "stored", "chosen"),
    [
        (Int8Linear, True, "auto", "bfloat16", "bfloat16"),
        (Int8Linear, True, "auto", "float16", "bfloat16"),
        (Int8Linear, True, "auto", "float32", "float32"),
        (Int8Linear, True, "float32", "bfloat16", "float32"),
        (Int8Linear, False, "auto", "bfloat16", "float32"),
        (Linear, True, "auto", "bfloat16", "float32"),
    ],
)
def test_the_int8_kernels_compute_beside_bfloat16_on_a_cpu_where_torch_is_slow_in_it(
    monkeypatch: pytest.MonkeyPatch,
    linear: LinearFactory,
    has_kernels: bool,
    wanted: str,
    stored: str,
    chosen: str,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(loader, "has_native_kernels", lambda: has_kernels)
    assert loader.dtype_name(wanted, stored, linear, for_gpu=False) == chosen


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'int3' is not supported; supported: auto, none, int8, int4"):
        quantization.choose("int3", checkpoint=None, dtype_is_auto=True, stored="bfloat16")


def test_a_quantised_checkpoint_is_not_rounded_twice() -> None:
    gptq = Quantization("gptq", GPTQ(128, False, 1), IgnoredLayers())
    assert quantization.choose("auto", checkpoint=gptq, dtype_is_auto=True, stored="bfloat16")[1] is Linear
    with pytest.raises(ConfigError, match=r"quantised already \(gptq\): drop --quantization int8"):
        quantization.choose("int8", checkpoint=gptq, dtype_is_auto=True, stored="bfloat16")


@pytest.mark.parametrize(
    ("weights", "is_multiplied"),
    [
        (GPTQ(128), True),
        (GPTQ(None), True),
        (AWQ(32), True),
        (Packed(4, 64), True),
        (GPTQ(128, has_act_order=True), False),
        (Packed(8, 64), False),
        (Packed(4, 48), False),
        (Scaled(FP8, (None, None)), False),
    ],
    ids=str,
)
def test_int4_multiplies_four_bits_that_a_checkpoint_stores_and_rounds_no_other_form_again(
    weights: WeightFormat, is_multiplied: bool
) -> None:
    stored = Quantization("named", weights, IgnoredLayers())
    arguments: dict[str, Any] = {"checkpoint": stored, "dtype_is_auto": True, "stored": "bfloat16"}
    assert quantization.choose("auto", **arguments) == ("named", Linear), "int4 is to be asked for"
    if is_multiplied:
        assert quantization.choose("int4", **arguments) == ("named, int4", make_int4_linear)
    else:
        with pytest.raises(ConfigError, match=r"\(named\): drop --quantization int4, .* int4 takes 4 bits"):
            quantization.choose("int4", **arguments)


@pytest.mark.parametrize(
    ("prefix", "sizes", "made"),
    [
        ("model.layers.0.mlp.gate_proj", (64, 48), Int4Linear),
        ("lm_head", (64, 48), Int8Linear),
        ("model.layers.0.mlp.gate", (64, 48), Int8Linear),
        ("model.layers.0.self_attn.qkv_proj", (64, 48), Int8Linear),
        ("model.layers.0.mlp.down_proj", (72, 48), Int8Linear),
        ("classifier", (64, 1), Int8Linear),
    ],
)
def test_the_head_routers_values_and_odd_sizes_stay_int8(
    prefix: str, sizes: tuple[int, int], made: type[Linear]
) -> None:
    in_size, out_size = sizes
    device = torch.device("cpu")
    layer = make_int4_linear(LinearShape([prefix], in_size, [out_size], True, torch.float32, device))
    assert type(layer) is made
    for target in layer.targets().values():
        target.copy_(torch.linspace(-1, 1, target.numel()).view(target.shape))
    x = torch.randn(3, in_size)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    bits = 4 if made is Int4Linear else 8
    layer.finish()
    assert (layer(x) - exact).abs().max() < 2.0 ** (3 - bits) * exact.abs().max()
    stored = sum(tensor.nbytes for tensor in layer.weights()) - 4 * out_size  # the bias
    if made is Int4Linear and has_native_kernels():
        assert stored == in_size * out_size * 4.5 / 8 + 4 * out_size


@pytest.mark.parametrize("block", [(None, None), (1, None), (128, 128)], ids=["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_weights_are_refused_on_a_gpu_without_fp8_and_nothing_else_is(
    dtype: str, block: tuple[int | None, int | None]
) -> None:
    def chosen(capability: int, element: torch.dtype) -> object:
        stored = Quantization("fp8", Scaled(element, block), IgnoredLayers())
        return quantization.choose(
            "none", checkpoint=stored, dtype_is_auto=False, stored=dtype, capability=capability
        )

    for capability, words in ((80, "8.0"), (86, "8.6")):
        why = rf"FP8 \(fp8\), and a GPU of compute capability {words} has no FP8: take one of 8\.9 or more"
        with pytest.raises(ConfigError, match=why):
            chosen(capability, FP8)
        assert chosen(capability, INT8) == ("fp8", GpuLinear)
    for capability in (89, 90, 100):
        assert chosen(capability, FP8) == ("fp8", GpuLinear)
