"""Qwen 3: Qwen 2 with norms on query and key heads instead of biases. Called by ``models.registry``."""

from dataclasses import replace

from quire_server.models.config import ModelConfig, common, with_windows
from quire_server.models.fields import Fields
from quire_server.models.qwen2 import windows


def configure(fields: Fields) -> ModelConfig:
    """Heads are 128 wide where the file is silent, whatever the hidden size."""
    bias = fields.flag("attention_bias")
    config = replace(common(fields, head_size=128), has_head_norms=True, qkv_bias=bias, output_bias=bias)
    return with_windows(config, windows(fields, config.num_layers))
