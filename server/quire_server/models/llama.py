"""Llama, and what has its shape. Called by ``models.registry``."""

from dataclasses import replace

from quire_server.models.config import ModelConfig, common
from quire_server.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    """Biases are flags, on all four matrices of attention."""
    bias = fields.flag("attention_bias")
    return replace(common(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))
