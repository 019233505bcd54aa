"""Architecture name -> model family. Called by ``runner.model_runner`` and the GGUF import."""

import torch

from quire_server.core.errors import ConfigError
from quire_server.layers.linear import Linear, LinearFactory
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


def shapes(config: ModelConfig, linear: LinearFactory = Linear) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, by name; nothing is allocated."""
    check(config)
    skeleton = build(config, max_len=1, dtype=torch.float32, device=torch.device("meta"), linear=linear)
    return {name: tuple(tensor.shape) for name, tensor in skeleton.targets().items()}


def build(
    config: ModelConfig,
    *,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
    linear: LinearFactory = Linear,
) -> Llama:
    """The model with its weights allocated but not filled; its linear layers come from the factory."""
    family = _FAMILIES[config.architecture]
    return family(config, max_len=max_len, dtype=dtype, device=device, linear=linear)
