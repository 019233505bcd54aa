"""Qwen 3: Qwen 2 with norms on query and key heads instead of biases."""

from dataclasses import replace

from quire_server.models.config import ModelConfig, common, with_windows
from quire_server.models.config_fields import ConfigFields
from quire_server.models.qwen2 import windows


def configure(fields: ConfigFields) -> ModelConfig:
    """The default head size is 128, whatever the hidden size."""
    bias = fields.flag("attention_bias")
    config = replace(common(fields, head_size=128), has_head_norms=True, qkv_bias=bias, output_bias=bias)
    return with_windows(config, windows(fields, config.num_layers))
