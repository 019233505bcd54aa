"""GPTQ and AWQ checkpoints written by Intel's auto-round, and the weights that its own layers read from them.

Run as a program, because it sets process-wide state: python -m tests.server.models.auto_round_oracle
DIRECTORY. DIRECTORY/float holds a Llama; ``gptq`` and ``awq`` get it quantised by rounding to the nearest,
and ``NAME.dequantised.safetensors`` the weights that auto-round computes with.
"""

import importlib.machinery
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


class _Absent(types.ModuleType):
    """Replaces ``datasets``, which auto-round imports for calibration data and which has 250 MB."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


_absent = _Absent("datasets")
_absent.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
sys.modules["datasets"] = _absent

from auto_round import AutoRound  # noqa: E402  # after the stand-in above
from auto_round.export.export_to_awq.utils import (  # noqa: E402  # after the stand-in above
    WQLinear_GEMM,
    dequantize_gemm,
)
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear  # noqa: E402  # after the stand-in above

GROUP = 128


def main(directory: Path) -> None:
    """Quantise with asymmetric zeros, so that symmetry hides no error."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{index}": index for index in range(211)}, "t0"))
    )
    for name in ("gptq", "awq"):
        model = LlamaForCausalLM.from_pretrained(directory / "float")
        rounder = AutoRound(
            model,
            tokenizer=tokenizer,
            scheme="W4A16",
            sym=False,
            iters=0,
            disable_opt_rtn=True,
            device_map="cpu",
        )
        rounder.quantize_and_save(str(directory / name), format=f"auto_{name}", inplace=True)
        (file,) = (directory / name).rglob("model.safetensors")
        file.parent.rename(directory / f"{name}-done")
        (directory / name).rmdir()
        (directory / f"{name}-done").rename(directory / name)
        save_file(dequantised(directory / name), directory / f"{name}.dequantised.safetensors")
    with_act_order(directory / "gptq", directory / "act_order")
    save_file(dequantised(directory / "act_order"), directory / "act_order.dequantised.safetensors")


def with_act_order(source: Path, directory: Path) -> None:
    """The same numbers, with the rows of the widest matrix in groups that are not contiguous."""
    shutil.copytree(source, directory)
    document = json.loads((directory / "config.json").read_text())
    document["quantization_config"]["desc_act"] = True
    (directory / "config.json").write_text(json.dumps(document))
    tensors = load_file(directory / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("down_proj.g_idx"))
    torch.manual_seed(0)
    tensors[name] = tensors[name][torch.randperm(len(tensors[name]))]
    save_file(tensors, directory / "model.safetensors")


def dequantised(directory: Path) -> dict[str, torch.Tensor]:
    """The float32 weights [out, in] of all quantised layers."""
    tensors = load_file(directory / "model.safetensors")
    prefixes = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    make = gptq if f"{prefixes[0]}.g_idx" in tensors else awq
    return {f"{prefix}.weight": make(prefix, tensors) for prefix in prefixes}


def pack_gptq(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """One matrix rounded to the nearest, in auto-round's layout."""
    (out, size), linear = weight.shape, _linear(weight)
    scales, zeros = _grid(weight, group)
    layer = QuantLinear(4, group, size, out, False)
    layer.pack(linear, scales, zeros)
    groups = torch.arange(size, dtype=torch.int32) // (size if group == -1 else group)
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    return parts | {"g_idx": groups}


def pack_awq(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """The same for AWQ."""
    scales, zeros = (part.T.contiguous() for part in _grid(weight, group))
    layer = WQLinear_GEMM.from_linear(_linear(weight), 4, group, scales=scales, zeros=zeros)
    return {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


def _grid(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [out, groups] from the smallest to the largest of a group."""
    tiles = weight.unflatten(1, (-1, weight.shape[1] if group == -1 else group))
    low, high = tiles.amin(-1), tiles.amax(-1)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def gptq(prefix: str, tensors: dict[str, Any], group: int = GROUP) -> torch.Tensor:
    """auto-round's layer applied to the unit matrix."""
    packed, scales, groups = (tensors[f"{prefix}.{part}"] for part in ("qweight", "scales", "g_idx"))
    layer = QuantLinear(4, group, packed.shape[0] * 8, packed.shape[1], False)
    layer.qweight, layer.qzeros = packed, tensors[f"{prefix}.qzeros"]
    layer.scales, layer.dequant_dtype = scales.float(), torch.int32
    if not torch.equal(groups, groups.sort().values):
        layer.g_idx = groups  # without act-order it would make the layer drop outputs beyond the inputs
    return layer(torch.eye(packed.shape[0] * 8)).T.contiguous()


def awq(prefix: str, tensors: dict[str, Any], group: int = GROUP) -> torch.Tensor:
    """auto-round's copy of AutoAWQ's arithmetic."""
    packed, zeros, scales = (tensors[f"{prefix}.{part}"] for part in ("qweight", "qzeros", "scales"))
    size = packed.shape[0] if group == -1 else group
    return dequantize_gemm(packed, zeros, scales.float(), 4, size).T.contiguous()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
