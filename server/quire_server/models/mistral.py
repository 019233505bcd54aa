"""Mistral: Llama with a sliding window on every layer, or on none. Called by ``models.registry``."""

from quire_server.models.config import ModelConfig, common, with_windows
from quire_server.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    """A null window is none; where the file is silent, transformers takes 4096."""
    config = common(fields)
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    return with_windows(config, [window] * config.num_layers)
