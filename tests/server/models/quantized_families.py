"""A small model of every family in every format of quantised checkpoints, written by the packages that write
such files, matrix by matrix and expert by expert; beside each the float model that they read from it.

Run as a program, because auto-round sets process-wide state: python -m tests.server.models.quantized_families
DIRECTORY. For DIRECTORY/FAMILY/float it writes DIRECTORY/FAMILY/FORMAT and DIRECTORY/FAMILY/FORMAT.float.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from tests.server.models import auto_round_oracle as auto_round
from tests.server.models import compressed_tensors_oracle as compressed
from tests.server.models import quantized_matrix

Tensors = dict[str, torch.Tensor]
# (stored tensors, the float weights that they represent, quantization_config).
Made = tuple[Tensors, Tensors, dict[str, Any]]

_LEFT_OUT = re.compile(r"embed_tokens|lm_head|(mlp|block_sparse_moe)\.gate\.weight")
_IGNORE = ["lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$"]


def _auto_round(name: str, group: int, config: dict[str, Any]) -> Callable[[Tensors], Made]:
    pack, read = (auto_round.pack_gptq, auto_round.gptq), (auto_round.pack_awq, auto_round.awq)
    packs, reads = {"gptq": pack, "awq": read}[name]
    config = {"quant_method": name, "bits": 4, "group_size": group} | config

    def quantise(weights: Tensors) -> Made:
        stored: Tensors = {}
        floats: Tensors = {}
        for full_name, weight in weights.items():
            prefix = full_name.removesuffix(".weight")
            stored |= {f"{prefix}.{part}": tensor for part, tensor in packs(weight, group).items()}
            floats[full_name] = reads(prefix, stored, group)
        return stored, floats, config

    return quantise


def _fp8(blocks: list[int] | None) -> Callable[[Tensors], Made]:
    config = FineGrainedFP8Config(weight_block_size=blocks, modules_to_not_convert=["lm_head"])
    rounding = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def quantise(weights: Tensors) -> Made:
        stored: Tensors = {}
        floats: Tensors = {}
        for name, weight in weights.items():
            made = rounding._quantize_one(name, weight)
            (scale_name,) = made.keys() - {name}
            if blocks is None:
                made[scale_name] = made[scale_name].reshape(())
            stored |= made
            floats[name] = Fp8Dequantize(None)._dequantize_one(made[name], made[scale_name], torch.float32)
        return stored, floats, config.to_dict()

    return quantise


def _compressed(scheme: str) -> Callable[[Tensors], Made]:
    def quantise(weights: Tensors) -> Made:
        root = torch.nn.Module()
        for name, weight in weights.items():
            *path, leaf = name.removesuffix(".weight").split(".")
            parent = root
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, torch.nn.Module())
                parent = getattr(parent, part)
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data.copy_(weight)
            parent.add_module(leaf, layer)
        group = compressed.SCHEMES[scheme] | {"targets": ["Linear"]}
        apply_quantization_config(root, QuantizationConfig(config_groups={"group_0": group}))
        compressed.set_scales(root)
        compressor = ModelCompressor.from_pretrained_model(root)
        compressor.compress_model(root)
        stored = {name: tensor.clone() for name, tensor in root.state_dict().items()}
        config = compressor.quantization_config.model_dump(mode="json", exclude_none=True)
        compressor.decompress_model(root)
        floats = {name: root.get_parameter(name).data for name in weights}
        return stored, floats, config | {"ignore": _IGNORE}

    return quantise


_AWQ = {"zero_point": True, "version": "gemm"}
_GPTQ = {"desc_act": False, "sym": False}
FORMATS: dict[str, Callable[[Tensors], Made]] = {
    "GPTQ": _auto_round("gptq", 32, _GPTQ),
    "GPTQ, whole rows": _auto_round("gptq", -1, _GPTQ),
    "AWQ": _auto_round("awq", 32, _AWQ),
    "AWQ, whole rows": _auto_round("awq", -1, _AWQ),
    "FP8 by tensor": _fp8(None),
    "FP8 by block": _fp8([32, 64]),
    "int8 w8a16": _compressed("int8 w8a16"),
    "int8 w8a16 asymmetric": _compressed("int8 w8a16 asymmetric"),
    "int4 w4a16 asymmetric": _compressed("int4 w4a16 asymmetric"),
    "fp8 by channel": _compressed("fp8 by channel"),
}  # fmt: skip


def write(source: Path, name: str) -> None:
    tensors = load_file(source / "model.safetensors")
    weights = {key: value for key, value in tensors.items() if value.ndim == 2 and not _LEFT_OUT.search(key)}
    stored, floats, quantization = FORMATS[name](weights)
    assert floats.keys() == weights.keys()
    document = json.loads((source / "config.json").read_text())
    for directory, own, config in (
        (source.parent / name, stored, document | {"quantization_config": quantization}),
        (source.parent / f"{name}.float", floats, document),
    ):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        kept = {key: value for key, value in tensors.items() if key not in weights}
        made = {key: value.detach().contiguous() for key, value in (kept | own).items()}
        save_file(made, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    assert tuple(FORMATS) == quantized_matrix.FORMATS
    for source in sorted(Path(sys.argv[1]).glob("*/float")):
        for name in FORMATS:
            write(source, name)
