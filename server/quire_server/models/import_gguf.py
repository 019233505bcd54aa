"""``quire-server import-gguf FILE OUT_DIR``: converts a GGUF file to a model directory.

A separate, short process, so that the server itself never parses GGUF. Everything is dequantised, one tensor
at a time, and the changes of llama.cpp's converter are reversed (``gguf_config.FAMILIES``). The directory
appears under its name only when it is complete, including the manifest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import torch

from quire_server.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from quire_server.layers.quantized.format import TensorSpec
from quire_server.model_dir import files
from quire_server.models import gguf_config, gguf_tokenizer, registry
from quire_server.models.config import ModelConfig
from quire_server.models.safetensors_file import Writer
from quire_server.text import rust_panics

_EXPERT = re.compile(r"\.experts\.(\d+)\.")  # GGUF stores the experts of a layer as one tensor


def run(path: Path, out: Path) -> None:
    """Convert a GGUF file to a model directory that this server loads."""
    if not path.is_file():
        raise ModelNotFoundError(f"There is no GGUF file at {path}.")
    with files.new_directory(out) as staging:
        _write_directory(_opened(path), staging)


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
        # The reader does not check counts and offsets, so any of these errors means a damaged file.
        raise ModelCorruptError(f"{path} is damaged or no GGUF file ({error}). Download it again.") from None


@dataclass(frozen=True, slots=True)
class _Source:
    """The location of a checkpoint tensor in the file. ``index``: in a stack of experts."""

    tensor: gguf.ReaderTensor
    index: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(int(size) for size in reversed(self.tensor.shape))
        return shape if self.index is None else shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """Float types are kept; quantised types become bfloat16, whose rounding is small compared with
        theirs.
        """
        kinds = {gguf.GGMLQuantizationType.F32: torch.float32, gguf.GGMLQuantizationType.F16: torch.float16}
        return kinds.get(self.tensor.tensor_type, torch.bfloat16)

    def values(self) -> torch.Tensor:
        data = self.tensor.data if self.index is None else self.tensor.data[self.index]
        try:
            values = gguf.quants.dequantize(data, self.tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"Tensor {self.tensor.name}: {error}. Use a GGUF file of another quantisation."
            ) from None
        if values.shape != self.shape:
            raise ModelCorruptError(f"Tensor {self.tensor.name} is damaged. Download the file again.")
        return torch.from_numpy(values.copy() if not values.flags.writeable else values)


def _write_directory(reader: gguf.GGUFReader, directory: Path) -> None:
    metadata = gguf_config.Metadata(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = gguf_config.config(metadata, tensors)
    try:
        with rust_panics.as_errors():
            tokenizer, tokenizer_config = gguf_tokenizer.build(metadata)
    except rust_panics.RustPanicError as error:
        raise ModelCorruptError(f"The tokenizer of the GGUF file cannot be used: {error}.") from None
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
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    model = registry.parse(config, tuple(config["eos_token_id"]))
    shapes = {name: tuple(tensor.shape) for name, tensor in registry.tensors(model).items()}
    sources = _sources(metadata.architecture, model.num_layers, tensors, shapes)
    with (directory / "model.safetensors").open("wb") as file:
        _write_safetensors(file, sources, model, gguf_config.family(metadata))


def _sources(
    architecture: str,
    num_layers: int,
    tensors: Mapping[str, gguf.ReaderTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, _Source]:
    """The tensors of the model that config.json describes, no more and no fewer. Names are mapped by the
    ``gguf`` package, which llama.cpp's converter uses.
    """
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], num_layers)
    sources: dict[str, _Source] = {}
    for name, shape in shapes.items():
        expert = _EXPERT.search(name)
        stacked = _EXPERT.sub(".experts.", name)
        found = tensors.get(names.get_name(stacked, try_suffixes=(".weight", ".bias")) or "")
        source = None if found is None else _Source(found, None if expert is None else int(expert[1]))
        if source is None or source.shape != shape or not _holds(source):
            raise ModelCorruptError(
                f"Tensor {name} has shape {source and source.shape}, and the metadata asks for {shape}. "
                "Download the file again."
            )
        sources[name] = source
    used = {source.tensor.name for source in sources.values()} | gguf_config.ROPE_TENSORS
    if unknown := sorted(tensors.keys() - used):
        raise ConfigError(
            f"Tensor {unknown[0]!r} belongs to no {architecture} model; this GGUF file's variant is not "
            "supported."
        )
    return sources


def _holds(source: _Source) -> bool:
    """Whether the stack contains this expert."""
    return source.index is None or source.index < int(source.tensor.shape[-1])


def _write_safetensors(
    file: BinaryIO, sources: Mapping[str, _Source], model: ModelConfig, family: gguf_config.Family
) -> None:
    """Convert and write one tensor at a time."""
    specs = {name: TensorSpec(source.shape, source.dtype) for name, source in sources.items()}
    writer = Writer(file, specs)
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
    for name, source in sources.items():
        values, part = source.values(), name.split(".")[-2]
        if family.has_interleaved_heads and part in heads:
            values = _halves(values, heads[part])
        if family.has_offset_norms and part.endswith("norm"):
            values = values - 1
        writer.write(name, values)
    writer.finish()


def _halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reverse llama.cpp's permutation: rotary pairs are half a head apart, not side by side."""
    head_size = rows.shape[0] // num_heads
    return rows.view(num_heads, head_size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
