"""GGUF in, model directory out: ``quire-server import-gguf FILE OUT_DIR``.

Runs once, as its own short process, so that the server itself never parses GGUF. Everything is dequantised,
one tensor at a time; q and k go back from llama.cpp's interleaved rotary order to halves. The directory
appears under its name only when it is complete, manifest included.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import torch

from quire_server.core import model_files
from quire_server.core.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.models import gguf_config, gguf_tokenizer, registry

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def run(path: Path, out: Path) -> None:
    """Convert a GGUF file into a model directory that this server loads."""
    if not path.is_file():
        raise ModelNotFoundError(f"There is no GGUF file at {path}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already. Remove it, or import to another directory.")
    reader = _opened(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_directory(reader, staging)
        staging.chmod(0o755)
        os.replace(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _opened(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (
        ValueError,
        IndexError,
        KeyError,
        OverflowError,
        MemoryError,
        UnicodeDecodeError,
        OSError,
    ) as error:
        # The reader trusts every count and offset in the file; what it trips over is the file's fault.
        raise ModelCorruptError(f"{path} is damaged or no GGUF file ({error}). Download it again.") from None


def _write_directory(reader: gguf.GGUFReader, directory: Path) -> None:
    metadata = gguf_config.Metadata(reader)
    config = gguf_config.config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    tokenizer, tokenizer_config = gguf_tokenizer.build(metadata)
    documents = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
        },
        "tokenizer_config.json": tokenizer_config,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"))
    tensors = [t for t in reader.tensors if t.name != gguf_config.ROPE_FACTORS]
    _check(tensors, registry.shapes(registry.parse(config, tuple(config["eos_token_id"]))))
    with (directory / "model.safetensors").open("wb") as file:
        _write_safetensors(file, tensors, heads)
    model_files.write_manifest(directory)


def _check(tensors: list[gguf.ReaderTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the tensors of the model that config.json describes."""
    found = {_name(tensor.name): _shape(tensor) for tensor in tensors}
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            raise ModelCorruptError(
                f"Tensor {name} has shape {found.get(name)}, and the metadata asks for {shapes.get(name)}. "
                "Download the file again."
            )


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _write_safetensors(file: BinaryIO, tensors: list[gguf.ReaderTensor], heads: tuple[int, int]) -> None:
    """Header first (every size is known), then one tensor after the other: memory holds one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape, dtype = _shape(tensor), _stored_dtype(tensor)
        end = offset + int(tensor.n_elements) * dtype.itemsize
        header[_name(tensor.name)] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for tensor in tensors:
        values = _dequantised(tensor)
        if tensor.name.endswith(("attn_q.weight", "attn_q.bias")):
            values = _halves(values, heads[0])
        elif tensor.name.endswith(("attn_k.weight", "attn_k.bias")):
            values = _halves(values, heads[1])
        stored = values.to(_stored_dtype(tensor)).contiguous()
        file.write(stored.view(torch.uint8).numpy().data)


def _name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if layer.isdecimal() and part in _BLOCK_NAMES:
            return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{kind}"
    raise ConfigError(
        f"Tensor {name!r} belongs to no Llama model; this GGUF file's variant is not supported."
    )


def _stored_dtype(tensor: gguf.ReaderTensor) -> torch.dtype:
    """Floats stay what they are; bfloat16 loses far less than quantising lost before."""
    kinds = {gguf.GGMLQuantizationType.F32: torch.float32, gguf.GGMLQuantizationType.F16: torch.float16}
    return kinds.get(tensor.tensor_type, torch.bfloat16)


def _dequantised(tensor: gguf.ReaderTensor) -> torch.Tensor:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"Tensor {tensor.name}: {error}. Use a GGUF file of another quantisation."
        ) from None
    if values.shape != _shape(tensor):
        raise ModelCorruptError(f"Tensor {tensor.name} is damaged. Download the file again.")
    return torch.from_numpy(values.copy() if not values.flags.writeable else values)


def _halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's permutation: rotary pairs lie n/2 apart again, not side by side."""
    head_size = rows.shape[0] // num_heads
    return rows.view(num_heads, head_size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
