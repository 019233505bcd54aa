"""Quantised checkpoints that are malicious, damaged or unsupported: errors name the field and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.model_dir.files import ModelFiles
from quire_server.models import registry
from tests.server.runner.in_process import load

DOWN = "model.layers.0.mlp.down_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_GROUP = {"targets": ["Linear"], "weights": _WEIGHTS}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": _GROUP},
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}


def weights(**changes: object) -> dict[str, Any]:
    return {"config_groups": {"group_0": _GROUP | {"weights": _WEIGHTS | changes}}}


def write(
    directory: Path,
    quantization: dict[str, Any],
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """A Llama of zeros and ones in the shapes that the configuration requires."""
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        eos_token_id=1,
    )
    directory.mkdir(exist_ok=True)
    document = config.to_dict() | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(document))
    wanted = registry.tensors(registry.load(ModelFiles.open(directory)))
    tensors = {
        name: torch.ones(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
        .to(tensor.dtype)
        .contiguous()
        for name, tensor in wanted.items()
    }
    for name, tensor in tensors.items():
        if name.endswith("g_idx"):
            tensor.copy_(torch.arange(len(tensor)) // 32)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, FP8, INT8], ids=["gptq", "awq", "fp8", "int8"])
def test_the_good_files_load(quantization: dict[str, Any], tmp_path: Path) -> None:
    load(write(tmp_path, quantization))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no method": (GPTQ, {"quant_method": None}, "quant_method '' .*supported: awq, compressed-tensors"),
    "another method": (
        GPTQ,
        {"quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes' is not supported",
    ),
    "gptq of 8 bits": (GPTQ, {"bits": 8}, "bits 8 is not supported; supported: 4"),
    "gptq without bits": (GPTQ, {"bits": None}, "'bits' is 'None'"),
    "gptq in groups of nothing": (
        GPTQ,
        {"group_size": 0},
        "group_size 0 is not supported; supported: -1, 32, 64, 128",
    ),
    "gptq in groups of 100": (GPTQ, {"group_size": 100}, "group_size 100 is not supported"),
    "gptq laid out for a kernel": (
        GPTQ,
        {"checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not",
    ),
    "gptq as marlin": (GPTQ, {"is_marlin_format": True}, "is_marlin_format .*not supported"),
    "gptq, mixed": (GPTQ, {"dynamic": {"-:.*down.*": {}}}, "dynamic .*not supported"),
    "gptq with a key of tomorrow": (
        GPTQ,
        {"rotation": "hadamard"},
        "'rotation' = 'hadamard' is not supported",
    ),
    "gptq that is no group of bits": (GPTQ, {"bits": True}, "'bits' is 'True', not a whole number"),
    "awq of 3 bits": (AWQ, {"bits": 3}, "bits 3 is not supported"),
    "awq for matrix-vector kernels": (AWQ, {"version": "gemv"}, "version 'gemv' is not supported"),
    "awq that leaves out a number": (
        AWQ,
        {"modules_to_not_convert": [3]},
        "'modules_to_not_convert' is .*names",
    ),
    "fp8 of another kind": (FP8, {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "fp8 with scales in powers of two": (FP8, {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
    "fp8 in blocks of nothing": (FP8, {"weight_block_size": [0, 128]}, "'weight_block_size' is"),
    "int8 in two ways": (INT8, {"config_groups": {"a": _GROUP, "b": _GROUP}}, "config_groups has 2 groups"),
    "int8 in no way": (INT8, {"config_groups": {}}, "config_groups has 0 groups"),
    "int8 for some layers": (
        INT8,
        {"config_groups": {"a": _GROUP | {"targets": ["re:.*mlp.*"]}}},
        r"config_groups: a: targets .*supported: \['Linear'\]",
    ),
    "int8 that is int4": (
        INT8,
        weights(num_bits=4),
        "weights: num_bits 4 of type int in format int-quantized",
    ),
    "int8 that is float": (INT8, weights(type="float"), "type float contradicts format int-quantized"),
    "float with zeros": (
        INT8 | {"format": "float-quantized"},
        weights(type="float", symmetric=False),
        "weights: only weights that are static, and symmetric if they are float",
    ),
    "int8 by token": (INT8, weights(strategy="token"), "strategy 'token' is not supported"),
    "int8 in groups of nothing": (INT8, weights(strategy="group", group_size=0), "'group_size' is '0'"),
    "int8 with act-order": (INT8, weights(actorder="group"), "actorder 'group' is not supported"),
    "int8 with a key of tomorrow": (INT8, weights(outliers=3), "weights: 'outliers' = '3' is not supported"),
    "int8, sparse": (
        INT8,
        {"sparsity_config": {"format": "sparse-24"}},
        "sparsity_config .*is not supported",
    ),
    "int8, rotated": (INT8, {"transform_config": {"R1": {}}}, "transform_config .*is not supported"),
    "int8 in another format": (INT8, {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
    "int8 with an endless pattern": (INT8, {"ignore": ["re:(a+)+$"]}, "ignore: pattern .*is not supported"),
    "int8 with a slow pattern": (INT8, {"ignore": ["re:.*.*.*.*x"]}, "ignore: pattern .*at most 3"),
    "int8 with a long name": (INT8, {"ignore": ["a" * 201]}, "ignore has .* more than 200 characters"),
    "int8 with an int8 cache": (
        INT8,
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        "kv_cache_scheme: type 'int' is not supported; supported: float",
    ),
}


@pytest.mark.parametrize(("good", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_name(
    good: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(
        (ConfigError, ModelCorruptError), match=f"(?s)quantization_config.*{message}|^{message}"
    ):
        write(tmp_path, good | change)


def _fill(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[f"{DOWN}.{name}"].view(-1)[3:4].fill_(value)


def _replace(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{DOWN}.{name}": tensor})


DAMAGED: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a scale is missing": (
        GPTQ,
        lambda tensors: tensors.pop(f"{DOWN}.scales"),
        f"1 tensors are in no file, {DOWN}.scales",
    ),
    "a scale is not a number": (
        GPTQ,
        _fill("scales", float("nan")),
        f"{DOWN}.scales holds values that are not finite",
    ),
    "a scale is infinite": (
        AWQ,
        _fill("scales", float("inf")),
        f"{DOWN}.scales holds values that are not finite",
    ),
    "a weight is not a number": (
        FP8,
        lambda tensors: tensors[f"{DOWN}.weight"].view(torch.uint8).view(-1)[0].fill_(0x7F),
        f"{DOWN}.weight holds values that are not finite",
    ),
    "the scales are integers": (
        AWQ,
        _replace("scales", torch.ones(3, 64, dtype=torch.int32)),
        f"{DOWN}.scales has dtype int32.*float type",
    ),
    "the weights are floats": (
        GPTQ,
        _replace("qweight", torch.ones(12, 64)),
        f"{DOWN}.qweight has dtype float32.*int32",
    ),
    "int8 where fp8 was announced": (
        FP8,
        _replace("weight", torch.ones(64, 96, dtype=torch.int8)),
        f"{DOWN}.weight has dtype int8.*float8_e4m3fn",
    ),
    "other groups": (
        GPTQ,
        _replace("scales", torch.ones(1, 64)),
        rf"{DOWN}.scales has shape \[1, 64\]; config.json asks for \[3, 64\]",
    ),
    "words along the other side": (
        AWQ,
        _replace("qweight", torch.ones(12, 64, dtype=torch.int32)),
        f"{DOWN}.qweight has shape",
    ),
    "a dense layer among them": (
        GPTQ,
        _replace("weight", torch.ones(64, 96)),
        f"{DOWN}.weight' fits nothing",
    ),
    "act-order that was not announced": (
        GPTQ,
        _fill("g_idx", 2),
        f"{DOWN}.g_idx reorders the groups.*desc_act false",
    ),
    "act-order beyond the groups": (
        GPTQ | {"desc_act": True},
        _fill("g_idx", 3),
        f"{DOWN}.g_idx names a group beyond the 3",
    ),
    "act-order below the groups": (
        GPTQ | {"desc_act": True},
        _fill("g_idx", -1),
        f"{DOWN}.g_idx names a group beyond the 3",
    ),
}


@pytest.mark.parametrize(("quantization", "change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_named(
    quantization: dict[str, Any],
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    tmp_path: Path,
) -> None:
    write(tmp_path, quantization, change)
    with pytest.raises(ModelCorruptError, match=message):
        load(tmp_path)


def test_a_shape_that_is_told_twice_must_be_the_same(tmp_path: Path) -> None:
    with pytest.raises(ModelCorruptError, match="weight_shape says"):
        load(write(tmp_path, INT8 | {"format": "pack-quantized"}))


def test_groups_that_do_not_divide_a_layer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelCorruptError, match="self_attn.*64 inputs cannot be divided by 128"):
        write(tmp_path, GPTQ | {"group_size": 128})
