"""Llama, and models of the same structure."""

from dataclasses import replace

from quire_server.models.config import ModelConfig, common
from quire_server.models.config_fields import ConfigFields


def configure(fields: ConfigFields) -> ModelConfig:
    """One flag for the biases of all four attention matrices, one for those of the MLP."""
    bias = fields.flag("attention_bias")
    return replace(common(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))
