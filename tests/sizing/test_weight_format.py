"""Weights that a GPU dequantises are counted as it holds them, and the server agrees which those are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kubectl.__main__ import main
from quire_server.health import model_config
from quire_server.layers.linear import LinearShape
from quire_server.layers.quantized.gpu_linear import can_multiply
from quire_server.models import quantization_config
from quire_server.models.config_fields import ConfigFields
from quire_sizing import memory
from quire_sizing.memory import Accelerator, Serving
from quire_sizing.model import from_config
from tests.sizing.test_sizing import LLAMA_8B

_TOKENS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] * 400,
    }


FLOAT, INT = ({"num_bits": 8, "type": kind} for kind in ("float", "int"))
STORED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 by row": compressed("float-quantized", FLOAT | {"strategy": "channel"}, _TOKENS | {"type": "float"}),
    "fp8 by tensor": compressed(
        "float-quantized", FLOAT, {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    ),
    "w8a8": compressed("int-quantized", INT | {"strategy": "channel"}, _TOKENS | {"type": "int"}),
    "packed": compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    ),
}
DEQUANTIZED = {
    "fp8 by block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 by block, compressed": compressed(
        "float-quantized",
        FLOAT | {"strategy": "block", "block_structure": [128, 128]},
        _TOKENS | {"type": "float"},
    ),
    "fp8 for any input": compressed("float-quantized", FLOAT | {"strategy": "channel"}),
    "int8 for any input": compressed("int-quantized", INT | {"strategy": "channel"}),
    "int8 by tensor": compressed("int-quantized", INT, _TOKENS | {"type": "int"}),
    "int8 with zeros": compressed(
        "int-quantized", INT | {"strategy": "channel", "symmetric": False}, _TOKENS | {"type": "int"}
    ),
    "packed, 8 bits": compressed("pack-quantized", INT | {"strategy": "channel"}),
}
CASES = [(name, stored, False) for name, stored in STORED.items()]
CASES += [(name, stored, True) for name, stored in DEQUANTIZED.items()]


def reported(tmp_path: Path, stored: object) -> dict[str, Any]:
    """What a pod reports of such a model's config.json, as the operator reads it."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "quantization_config": stored}))
    read: dict[str, Any] = json.loads(json.dumps(model_config.read(tmp_path)))
    return read


@pytest.mark.parametrize(("name", "stored", "expected"), CASES, ids=[name for name, *_ in CASES])
def test_the_operator_and_the_server_agree_on_what_a_gpu_dequantises(
    tmp_path: Path, name: str, stored: dict[str, Any], expected: bool
) -> None:
    parsed = quantization_config.parse(ConfigFields(stored, "config.json"))
    shape = LinearShape(["up_proj"], 4096, [4096], False, torch.bfloat16, torch.device("cpu"))
    assert parsed is not None and can_multiply(parsed.weights, shape) is not expected
    config = reported(tmp_path, stored)
    assert from_config(config).dequantized == int(expected) and len(json.dumps(config)) < 1500
    assert from_config({**LLAMA_8B, "quantization_config": stored}).dequantized == int(expected)


@pytest.mark.parametrize(
    "stored",
    [None, [], "fp8", {"quant_method": ["fp8"]}, {"quant_method": "compressed-tensors", "config_groups": [1]},
     {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
     {"quant_method": "awq", "group_size": "many"}],
    ids=str,
)  # fmt: skip
def test_a_config_that_holds_anything_is_read(tmp_path: Path, stored: object) -> None:
    assert from_config(reported(tmp_path, stored)).dequantized == 0


def test_dequantised_weights_are_counted_with_16_bits_and_the_reason_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    h100 = Accelerator(memory=80 * 10**9)
    model = from_config(reported(tmp_path, DEQUANTIZED["fp8 by block"]))
    sized = memory.budget(model, h100, Serving(max_model_len=4096, weight_bits=8.3))
    plain = memory.budget(from_config(LLAMA_8B), h100, Serving(max_model_len=4096))
    assert sized == plain
    as_stored = from_config(reported(tmp_path, STORED["fp8"]))
    halved = memory.budget(as_stored, h100, Serving(max_model_len=4096, weight_bits=8)).weights
    assert 2 * halved == plain.weights
    reported(tmp_path, DEQUANTIZED["fp8 by block"])
    main(["size", str(tmp_path), "--memory", "80GB", "--weight-bits", "8", "--max-model-len", "4096"])
    text = capsys.readouterr().out
    assert "16 bits each" in text and "No kernel of a GPU multiplies the format" in text
