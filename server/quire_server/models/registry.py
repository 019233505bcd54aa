"""Architecture name -> model family. Called by ``runner.model_runner``."""

import torch

from quire_server.core.errors import ConfigError
from quire_server.models.config import ModelConfig
from quire_server.models.llama import Llama

_FAMILIES = {"LlamaForCausalLM": Llama}


def check(config: ModelConfig) -> None:
    """Refuse what no family serves, before anything is allocated."""
    if config.architecture not in _FAMILIES:
        supported = ", ".join(sorted(_FAMILIES))
        raise ConfigError(
            f"Architecture {config.architecture[:60]!r} is not supported; supported: {supported}."
        )


def build(config: ModelConfig, *, max_len: int, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model with its weights allocated but not filled."""
    return _FAMILIES[config.architecture](config, max_len=max_len, dtype=dtype, device=device)
