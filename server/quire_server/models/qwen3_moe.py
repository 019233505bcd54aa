"""Qwen 3 with experts in some or all layers. Called by ``models.registry``."""

from dataclasses import replace

from quire_server.models.config import Experts, ModelConfig, common, with_windows
from quire_server.models.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    """Every decoder_sparse_step-th layer has experts, but for mlp_only_layers; all have the same window."""
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
        fields.complain("mlp_only_layers", "a list of layers")
    layers = tuple(
        replace(layer, is_sparse=(index + 1) % step == 0 and index not in dense)
        for index, layer in enumerate(config.layers)
    )
    window = fields.optional_integer("sliding_window", 1 << 24, absent=4096)
    window = window if fields.flag("use_sliding_window") else None
    fields.raw("max_window_layers")  # published files carry it; transformers does not read it here
    return with_windows(replace(config, experts=experts, layers=layers), [window] * config.num_layers)
