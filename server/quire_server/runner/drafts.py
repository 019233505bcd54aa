"""Whether a directory can be the draft model of another one, and what it costs. Called by ``model_runner``
before anything is loaded, and by ``alignment``.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_server.core.errors import ConfigError
from quire_server.layers.int8_linear import has_native_kernels
from quire_server.runner import kv_cache
from quire_server.runner.checkpoint import Checkpoint
from quire_server.runner.options import RunnerOptions
from quire_server.text.tokenizer import refuse_other_vocabulary


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model that fits, not read yet."""

    checkpoint: Checkpoint
    block_size: int
    stored: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Its keys and values of one block; the lower tiers keep none of them."""
        return kv_cache.block_bytes(self.checkpoint.config, self.block_size, self.stored)

    def allocate(self, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
        """Caches for as many blocks as the model has."""
        config = self.checkpoint.config
        return kv_cache.allocate(config, num_blocks, self.block_size, dtype=self.stored, device=device)


def open_draft(model: Checkpoint, options: RunnerOptions, capability: int | None = None) -> Draft | None:
    """The draft model of the options, or None. Raises ConfigError where it cannot draft for the model.
    ``capability``: of the GPU that computes both.
    """
    if options.speculative_model is None:
        return None
    found = open_as_draft(options.speculative_model, capability)
    refuse_misfit(model, found)
    wanted = options.max_model_len or model.config.max_position
    if found.config.max_position < wanted:
        raise ConfigError(
            f"The draft model has {found.config.max_position} positions, and the context may have {wanted} "
            f"tokens: set --max-model-len to {found.config.max_position} or less, or take another draft."
        )
    return Draft(found, options.block_size, kv_cache.storage_dtype(options.kv_cache_dtype, found.dtype))


def open_as_draft(directory: Path, capability: int | None = None) -> Checkpoint:
    """With the fastest arithmetic there is: a wrong draft costs time and nothing else."""
    found = Checkpoint.open(directory, dtype="auto", quantization_name="auto", capability=capability)
    if capability is not None or found.quantization != "none" or not has_native_kernels():
        return found
    return Checkpoint.open(directory, dtype="auto", quantization_name="int8")


def refuse_misfit(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise ConfigError unless both speak of the same tokens."""
    if model.files.exists("tokenizer.json") or draft.files.exists("tokenizer.json"):
        refuse_other_vocabulary(model.files, draft.files)
    elif model.config.vocab_size != draft.config.vocab_size:
        raise ConfigError(
            f"The draft model has {draft.config.vocab_size} tokens and the model {model.config.vocab_size}. "
            "Take a draft with the same tokenizer."
        )
