"""Phi-3, Phi-3.5 mini, Phi-4: Llama with fused matrices in the checkpoint.

With longrope the context ends at original_max_position_embeddings: a longer context would change the rotation
of earlier tokens, whose keys are in the KV cache already.
"""

from dataclasses import replace

from quire_server.errors import ConfigError
from quire_server.models.config import ModelConfig, TensorNames, common, with_windows
from quire_server.models.config_fields import ConfigFields
from quire_server.models.rope_config import RopeKeys

_ROPES = ("default", "longrope")  # transformers supports no other
_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def configure(fields: ConfigFields) -> ModelConfig:
    """q, k and v are one matrix, in this order; so are gate and up."""
    config = replace(common(fields, eps=1e-5, rope_keys=RopeKeys(may_be_partial=True)), names=_NAMES)
    if (kind := config.layers[0].rope.kind) not in _ROPES:
        raise ConfigError(
            f"config.json: rope_scaling: rope_type {kind!r} is not supported for Phi-3; supported: "
            f"{', '.join(_ROPES)}."
        )
    window = fields.optional_integer("sliding_window", 1 << 24)
    return with_windows(config, [window] * config.num_layers)
