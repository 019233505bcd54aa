"""The model to be quantised: checked like a model to be served, then read layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from quire_server.errors import ConfigError
from quire_server.layers.quantized.format import TensorSpec
from quire_server.model_dir.files import MANIFEST_NAME, ModelFiles
from quire_server.model_dir.generation_config import eos_token_ids
from quire_server.models import registry, weights
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Layer, build_layer
from quire_server.quantize.calibrated_layer import ObservedLinear

_CPU, _META = torch.device("cpu"), torch.device("meta")
# Files copied along with the weights. Code and pickles are not copied.
_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_KEPT_PREFIXES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_OWN = ("config.json", MANIFEST_NAME, "model.safetensors.index.json")
_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Headers and digests are checked. ``stored``: every tensor of the model as it is in the files."""

    files: ModelFiles
    document: dict[str, Any]  # config.json
    config: ModelConfig
    shards: tuple[weights.Shard, ...]
    stored: dict[str, TensorSpec]

    @classmethod
    def open(cls, model_dir: Path) -> "SourceModel":
        """Raises QuireServerError for a model that this server cannot serve, or that is already quantised."""
        files = ModelFiles.open(model_dir)
        document = files.read_json("config.json")
        config = registry.parse(document, eos_token_ids(files))
        if config.quantization is not None:
            raise ConfigError(
                f"{model_dir} is quantised already ({config.quantization.method}): quantise the model "
                "that it was made from."
            )
        wanted = registry.tensors(config)
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        shards = weights.inspect(files, wanted, tied)
        if files.manifest:
            weights.read(files, shards, {}, lambda loaded, total: None)
        stored = {
            tensor.name: TensorSpec(tensor.shape, tensor.dtype)
            for shard in shards
            for tensor in shard.tensors
            if tensor.name in wanted
        }
        return cls(files, document, config, shards, stored)

    @property
    def dtype(self) -> torch.dtype:
        """The type in config.json, in which scales and norms are stored."""
        return cast(torch.dtype, getattr(torch, self.config.dtype))

    def skeleton(self, index: int) -> Layer:
        """A layer without content."""
        return build_layer(self.config, index, dtype=torch.float32, device=_META, linear=ObservedLinear)

    def layer(self, index: int) -> Layer:
        """A layer in float32, ready to compute."""
        layer = build_layer(self.config, index, dtype=torch.float32, device=_CPU, linear=ObservedLinear)
        weights.pick(self.files, self.shards, layer.targets())
        layer.finish()
        return layer

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored."""
        spec = self.stored[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        weights.pick(self.files, self.shards, {name: tensor})
        return tensor

    def copy_others(self, directory: Path) -> None:
        """Copy the tokenizer, chat templates and licences: files that are neither weights, code nor
        rewritten.
        """
        for name in self._others():
            with (directory / name).open("wb") as target, self.files.opened(name) as (file, size, digest):
                _copy(file, target, digest.update)

    def _others(self) -> Iterator[str]:
        for path in sorted(self.files.root.iterdir()):
            is_kept = path.suffix in _KEPT_SUFFIXES or path.name.startswith(_KEPT_PREFIXES)
            is_known = not self.files.manifest or path.name in self.files.manifest
            if is_kept and is_known and path.is_file() and path.name not in _OWN:
                yield path.name


def _copy(file: BinaryIO, target: BinaryIO, digest: Any) -> None:
    while chunk := file.read(_CHUNK):
        digest(memoryview(chunk))
        target.write(chunk)
