"""Mistral: Llama with a sliding window on every layer, or on none."""

from quire_server.models.config import ModelConfig, common, with_windows
from quire_server.models.config_fields import ConfigFields


def configure(fields: ConfigFields) -> ModelConfig:
    """A null window means none; if the key is missing, transformers uses 4096."""
    config = common(fields)
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    return with_windows(config, [window] * config.num_layers)
