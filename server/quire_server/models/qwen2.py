"""Qwen 2 and 2.5: Llama with biases on q, k and v, and an optional sliding window on the upper layers."""

from dataclasses import replace

from quire_server.models.config import ModelConfig, common, with_windows
from quire_server.models.config_fields import ConfigFields, layer_types


def configure(fields: ConfigFields) -> ModelConfig:
    """The biases are always present."""
    config = replace(common(fields), qkv_bias=True)
    return with_windows(config, windows(fields, config.num_layers))


def windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """From layer_types, or from max_window_layers on; all None unless use_sliding_window. Also for Qwen 3."""
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    first = fields.integer("max_window_layers", 1 << 10, 28, smallest=0)
    types = layer_types(fields, num_layers)
    if not fields.flag("use_sliding_window"):
        return [None] * num_layers
    if types is None:
        return [window if index >= first else None for index in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in types]
