"""Gemma 2 and the text models of Gemma 3: norms before and after attention and MLP, layers with and without a
sliding window, a scaled embedding.
"""

from dataclasses import replace

from quire_server.errors import ConfigError
from quire_server.models import rope_config
from quire_server.models.config import ModelConfig, TensorNames, common, with_windows
from quire_server.models.config_fields import ConfigFields, layer_types
from quire_server.models.rope_config import RopeKeys

_NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def configure_2(fields: ConfigFields) -> ModelConfig:
    """Scores and logits are capped; every second layer has a sliding window."""
    config = _gemma(fields, 2, rope_config.DEFAULT_KEYS)
    # A second copy of the window in published files; transformers ignores it.
    fields.raw("sliding_window_size")
    return replace(
        config,
        attention_softcap=fields.optional_number("attn_logit_softcapping", absent=50.0),
        logit_softcap=fields.optional_number("final_logit_softcapping", absent=30.0),
    )


def configure_3(fields: ConfigFields) -> ModelConfig:
    """Query and key heads have norms. Five of six layers have a sliding window and a rotation of their
    own.
    """
    if fields.raw("attn_logit_softcapping") is not None:
        raise ConfigError("config.json: attn_logit_softcapping is not supported for Gemma 3. Set it to null.")
    pattern = fields.integer("sliding_window_pattern", 1 << 10, 6)
    everywhere = RopeKeys(theta=1e6, layer_type="full_attention")
    config = _gemma(fields, pattern, everywhere)
    local = rope_config.parse(
        fields,
        config.head_size,
        config.max_position,
        RopeKeys(theta_key="rope_local_base_freq", layer_type="sliding_attention"),
    )
    return replace(
        config,
        layers=tuple(
            layer if layer.window is None else replace(layer, rope=local) for layer in config.layers
        ),
        has_head_norms=True,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _gemma(fields: ConfigFields, pattern: int, keys: RopeKeys) -> ModelConfig:
    config = common(fields, head_size=256, rope_keys=keys, ties=True, activation="gelu_pytorch_tanh")
    bias = fields.flag("attention_bias")
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    types = layer_types(fields, config.num_layers)
    windows = [
        window if (types[index] == "sliding_attention" if types else (index + 1) % pattern) else None
        for index in range(config.num_layers)
    ]
    config = replace(
        config,
        activation="gelu_tanh",
        qkv_bias=bias,
        output_bias=bias,
        has_offset_norms=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        names=_NAMES,
    )
    return with_windows(config, windows)
