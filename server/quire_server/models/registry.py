"""Architecture name -> model family. Called by ``runner.model_runner`` and the GGUF import."""

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


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, by name; nothing is allocated."""
    check(config)
    skeleton = build(config, max_len=1, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(tensor.shape) for name, tensor in skeleton.targets().items()}


def build(config: ModelConfig, *, max_len: int, dtype: torch.dtype, device: torch.device) -> Llama:
    """The model with its weights allocated but not filled."""
    return _FAMILIES[config.architecture](config, max_len=max_len, dtype=dtype, device=device)
