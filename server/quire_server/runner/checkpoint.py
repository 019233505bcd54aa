"""A model directory that was looked at, and not read yet: what it is, how it will compute, how many bytes it
has. Called by ``model_runner`` for the model and for its draft model, so that settings that cannot work fail
before the long part.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from quire_server.core.errors import ConfigError
from quire_server.core.model_files import ModelFiles
from quire_server.layers.linear import LinearFactory
from quire_server.models import registry, weights
from quire_server.models.config import ModelConfig
from quire_server.models.decoder import Decoder
from quire_server.runner import quantization

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Headers are checked, weights are still in the files."""

    files: ModelFiles
    config: ModelConfig
    shards: tuple[weights.Shard, ...]
    dtype_name: str
    quantization: str
    linear: LinearFactory

    @classmethod
    def open(
        cls, model_dir: Path, *, dtype: str, quantization_name: str, capability: int | None = None
    ) -> "Checkpoint":
        """Read config.json and the headers, and decide the arithmetic; ``auto`` is the machine's choice.
        ``capability``: a GPU's that is to compute.
        """
        files = ModelFiles.open(model_dir)
        config = registry.load(files)
        dtype_name = _dtype_name(dtype, config.dtype, for_gpu=capability is not None)
        chosen, linear = quantization.choose(
            quantization_name,
            checkpoint=config.quantization,
            dtype_is_auto=dtype == "auto",
            dtype=dtype_name,
            capability=capability,
        )
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        shards = weights.inspect(files, registry.tensors(config, linear), tied)
        return cls(files, config, shards, dtype_name, chosen, linear)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return _DTYPES[self.dtype_name]

    @property
    def arithmetic(self) -> str:
        """For the log."""
        return f"{self.dtype_name} {self.quantization}"

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(shard.size for shard in self.shards)

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Of each layer's matrices, in the form that it computes with."""
        return registry.layer_bytes(self.config, self.dtype, self.linear)

    def read(
        self,
        *,
        max_len: int,
        device: torch.device,
        on_progress: Callable[[int, int], None],
        host_layers: Collection[int] = (),
    ) -> Decoder:
        """The model, ready to compute but for the matrices of ``host_layers``, which are on the host;
        on_progress(loaded bytes, total bytes) between chunks.
        """
        model = registry.build(
            self.config,
            max_len=max_len,
            dtype=self.dtype,
            device=device,
            linear=self.linear,
            host_layers=host_layers,
        )
        weights.read(self.files, self.shards, model.targets(), on_progress)
        model.finish()
        return model


def _dtype_name(wanted: str, stored: str, *, for_gpu: bool) -> str:
    """auto: the checkpoint's, where the machine computes in it; float32 elsewhere."""
    if wanted == "auto":
        has_bf16 = for_gpu or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return "bfloat16" if stored != "float32" and has_bf16 else "float32"
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype {wanted!r} is not supported; supported: auto, {', '.join(_DTYPES)}.")
    return wanted
