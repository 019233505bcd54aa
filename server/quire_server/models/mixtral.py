"""Mixtral: Mistral with experts in every layer."""

from dataclasses import replace

from quire_server.models.config import Experts, ModelConfig, TensorNames, common, with_windows
from quire_server.models.config_fields import ConfigFields
from quire_server.models.rope_config import RopeKeys

_EXPERT = "block_sparse_moe.experts.{}"
_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate_up=(f"{_EXPERT}.w1", f"{_EXPERT}.w3"),
    expert_down=f"{_EXPERT}.w2",
)


def configure(fields: ConfigFields) -> ModelConfig:
    """The weights of the selected experts are always normalised."""
    config = common(fields, eps=1e-5, rope_keys=RopeKeys(theta=1e6))
    count = fields.integer("num_local_experts", 1 << 12, 8)
    experts = Experts(
        count,
        fields.integer("num_experts_per_tok", count, min(2, count)),
        config.intermediate_size,
        normalises_weights=True,
    )
    layers = tuple(replace(layer, is_sparse=True) for layer in config.layers)
    window = fields.optional_integer("sliding_window", 1 << 24)
    return with_windows(
        replace(config, experts=experts, layers=layers, names=_NAMES), [window] * config.num_layers
    )
