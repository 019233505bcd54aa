"""Qwen 3 with experts in some or all layers."""

from dataclasses import replace

from quire_server.models.config import Experts, ModelConfig, common, with_windows
from quire_server.models.config_fields import ConfigFields


def configure(fields: ConfigFields) -> ModelConfig:
    """Every decoder_sparse_step-th layer has experts, except mlp_only_layers; all layers have the same
    window.
    """
    bias = fields.flag("attention_bias")
    config = replace(common(fields), has_head_norms=True, qkv_bias=bias, output_bias=bias)
    count = fields.integer("num_experts", 1 << 12, fields.integer("num_local_experts", 1 << 12, 128))
    experts = Experts(
        count,
        fields.integer("num_experts_per_tok", count, min(8, count)),
        fields.integer("moe_intermediate_size", 1 << 20, 768),
        normalises_weights=fields.flag("norm_topk_prob"),
    )
    step = fields.integer("decoder_sparse_step", 1 << 10, 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        fields.raise_invalid("mlp_only_layers", "a list of layers")
    layers = tuple(
        replace(layer, is_sparse=(index + 1) % step == 0 and index not in dense)
        for index, layer in enumerate(config.layers)
    )
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    window = window if fields.flag("use_sliding_window") else None
    fields.raw("max_window_layers")  # in published files; transformers ignores it for this model
    return with_windows(replace(config, experts=experts, layers=layers), [window] * config.num_layers)
