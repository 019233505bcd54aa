"""The models of the parity matrix: settings of transformers, at least one of every family.

Windows are shorter than the prompts, and rope scalings take effect within their lengths. Data only: the
generated documentation reads it too.
"""

from typing import Any

VOCAB = 211
WINDOW = 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # wide, so that the likeliest token is well above the second
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 1.6,
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# name -> (architecture's prefix in transformers, settings)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, one kv head, biases": (
        "Llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "Llama, llama3 rope, own head size": ("Llama", {"head_dim": 24, "rope_parameters": _LLAMA3}),
    "Llama, linear rope, all kv heads": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "Mistral, sliding window": ("Mistral", {"sliding_window": WINDOW}),
    "Qwen 2, yarn, window on the upper layers": (
        "Qwen2",
        {
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "Qwen 3, norms of heads, yarn": (
        "Qwen3",
        {"head_dim": 24, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "Qwen 3 MoE, one dense layer": (
        "Qwen3Moe",
        _EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 16},
    ),
    "Mixtral, one kv head": (
        "Mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    ),
    "Gemma 2, soft caps, local layers": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 0.3},
    ),
    "Gemma 3, two ropes, local layers": (
        "Gemma3",
        _GEMMA
        | {
            "rope_parameters": _GEMMA3_ROPES,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Phi-3, fused, sliding window": ("Phi3", {"sliding_window": WINDOW}),
    "Phi-3, longrope, partial rotation, tied": (
        "Phi3",
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 160,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
}
