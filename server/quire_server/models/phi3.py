"""Phi-3, Phi-3.5 mini, Phi-4: Llama with fused matrices in the checkpoint. Called by ``models.registry``.

With longrope the context ends at original_max_position_embeddings: beyond it the rotations of all earlier
tokens change, and what is in the KV cache would be wrong.
"""

from dataclasses import replace

from quire_server.core.errors import ConfigError
from quire_server.models.config import ModelConfig, Names, common, with_windows
from quire_server.models.fields import Fields
from quire_server.models.rope_config import Wording

_ROPES = ("default", "longrope")  # transformers runs no other
_NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def configure(fields: Fields) -> ModelConfig:
    """q, k and v lie in this order in one matrix; so do gate and up."""
    config = replace(common(fields, eps=1e-5, rope_wording=Wording(may_be_partial=True)), names=_NAMES)
    if (kind := config.layers[0].rope.kind) not in _ROPES:
        raise ConfigError(
            f"config.json: rope_scaling: rope_type {kind!r} is not supported for Phi-3; supported: "
            f"{', '.join(_ROPES)}."
        )
    window = fields.optional_integer("sliding_window", 1 << 24)
    return with_windows(config, [window] * config.num_layers)
