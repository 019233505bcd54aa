"""Checkpoints written by compressed-tensors and by transformers' own FP8 code, and transformers' answers with
their weights.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, FineGrainedFP8Config, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKEN = {"strategy": "token", "dynamic": True}
_KV_SCHEME = _FP8 | {"strategy": "tensor", "dynamic": False}

SCHEMES: dict[str, dict[str, Any]] = {
    "int8 w8a8": {"weights": _INT8 | {"strategy": "channel"}, "input_activations": _INT8 | _TOKEN},
    "int8 w8a8 by tensor, static": {
        "weights": _INT8 | {"strategy": "tensor"},
        "input_activations": _INT8 | {"strategy": "tensor"},
    },
    "int8 w8a16": {"weights": _INT8 | {"strategy": "channel"}},
    "int8 w8a16 by group": {"weights": _INT8 | {"strategy": "group", "group_size": 32}},
    "int8 w8a16 asymmetric": {"weights": _INT8 | {"strategy": "channel", "symmetric": False}},
    "int4 w4a16 asymmetric": {
        "weights": _INT8 | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    },
    "int4 w4a16": {"weights": _INT8 | {"num_bits": 4, "strategy": "group", "group_size": 128}},
    "fp8 by channel": {"weights": _FP8 | {"strategy": "channel"}, "input_activations": _FP8 | _TOKEN},
    "fp8 by tensor, static": {
        "weights": _FP8 | {"strategy": "tensor"},
        "input_activations": _FP8 | {"strategy": "tensor"},
    },
    "fp8 by block": {
        "weights": _FP8 | {"strategy": "block", "block_structure": [128, 128]},
        "input_activations": _FP8 | _TOKEN,
    },
}


def write(
    source: Path,
    directory: Path,
    scheme: str,
    ignore: Sequence[str] = ("lm_head",),
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """Quantise the Llama in ``source`` with this scheme, with scales by the largest value."""
    model = LlamaForCausalLM.from_pretrained(source)
    group = SCHEMES[scheme] | {"targets": ["Linear"]}
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"group_0": group},
            ignore=list(ignore),
            kv_cache_scheme=_KV_SCHEME if kv_scales else None,
        ),
    )
    for module in model.modules():
        if kv_scales is not None and hasattr(module, "k_scale"):
            module.k_scale.data.fill_(kv_scales[0])
            module.v_scale.data.fill_(kv_scales[1])
    set_scales(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


def set_scales(model: torch.nn.Module) -> None:
    """By the largest value, and by the smallest if there are zeros."""
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        arguments, scale = module.quantization_scheme.weights, module.weight_scale
        rows = module.weight.shape[0] // scale.shape[0] if scale.ndim == 2 else module.weight.shape[0]
        columns = module.weight.shape[1] // scale.shape[-1]
        tiles = module.weight.detach().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales, zeros = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), arguments)
        scale.data.copy_(scales.reshape(scale.shape))
        if not arguments.symmetric:
            module.weight_zero_point.data.copy_(zeros.reshape(scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)


def write_transformers_fp8(source: Path, directory: Path, blocks: list[int] | None) -> None:
    """The FP8 checkpoint that transformers writes on a GPU, with its own rounding and configuration."""
    config = FineGrainedFP8Config(weight_block_size=blocks, modules_to_not_convert=["lm_head"])
    rounding = Fp8Quantize(SimpleNamespace(quantization_config=config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            made = rounding._quantize_one(name, tensor)
            if blocks is None:
                made = {key: value if key == name else value.reshape(()) for key, value in made.items()}
            tensors |= made
        else:
            tensors[name] = tensor
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    document = json.loads((source / "config.json").read_text())
    document["quantization_config"] = config.to_dict()
    (directory / "config.json").write_text(json.dumps(document))


def round_kv(model: LlamaForCausalLM, kv_scales: tuple[float, float]) -> None:
    """Let compressed-tensors round every key and value of the model to FP8."""
    apply_quantization_config(model, QuantizationConfig(config_groups={}, kv_cache_scheme=_KV_SCHEME))
    for layer in model.model.layers:
        layer.self_attn.k_scale.data.fill_(kv_scales[0])
        layer.self_attn.v_scale.data.fill_(kv_scales[1])


def reference(directory: Path) -> LlamaForCausalLM:
    """transformers in float32 with weights that it dequantised itself."""
    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    config = CompressedTensorsConfig(dequantize=True)
    if method == "fp8":
        config = FineGrainedFP8Config(dequantize=True)
    with warnings.catch_warnings():
        # Passed to request dequantising.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        return LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, quantization_config=config
        ).eval()
