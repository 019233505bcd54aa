"""config.json of published models, key for key, and the expected configuration."""

from typing import Any

_TRAINING: dict[str, Any] = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
}


def _config(architecture: str, model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Sizes: hidden, intermediate, layers, heads, kv heads, vocabulary, positions."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    head = {"architectures": [architecture], "model_type": model_type, "bos_token_id": 1, "eos_token_id": 2}
    if not model_type.startswith("gemma"):
        head["hidden_act"] = "silu"
    return _TRAINING | head | dict(zip(names, sizes, strict=True)) | more


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1 8B": (
        _config(
            "LlamaForCausalLM", "llama", (4096, 14336, 32, 32, 8, 128256, 131072),
            attention_bias=False, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=500000.0,
            eos_token_id=[128001, 128008, 128009], tie_word_embeddings=False,
            rope_scaling={
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        ),
        {"head_size": 128, "max_position": 131072, "tie_word_embeddings": False},
    ),
    "SmolLM2 135M": (
        _config(
            "LlamaForCausalLM", "llama", (576, 1536, 30, 9, 3, 49152, 8192),
            attention_bias=False, mlp_bias=False, is_llama_config=True, pretraining_tp=1,
            rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
            rms_norm_eps=1e-5, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        {"head_size": 64, "tie_word_embeddings": True},
    ),
    "Mistral 7B v0.1": (
        _config(
            "MistralForCausalLM", "mistral", (4096, 14336, 32, 32, 8, 32000, 32768),
            rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
        ),
        {"windows": {4096}},
    ),
    "Mistral Nemo": (
        _config(
            "MistralForCausalLM", "mistral", (5120, 14336, 40, 32, 8, 131072, 131072),
            head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False,
        ),
        {"windows": {None}, "head_size": 128},
    ),
    "Qwen 2.5 7B": (
        _config(
            "Qwen2ForCausalLM", "qwen2", (3584, 18944, 28, 28, 4, 152064, 32768),
            max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=131072,
            tie_word_embeddings=False, use_sliding_window=False, use_mrope=False,
        ),
        {"windows": {None}, "qkv_bias": True, "output_bias": False},
    ),
    "Qwen 3 8B, yarn as its card says": (
        _config(
            "Qwen3ForCausalLM", "qwen3", (4096, 12288, 36, 32, 8, 151936, 40960),
            attention_bias=False, head_dim=128, max_window_layers=36, rms_norm_eps=1e-6, rope_theta=1e6,
            sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        {"has_head_norms": True, "qkv_bias": False, "max_position": 131072},
    ),
    "Qwen 3 30B A3B": (
        _config(
            "Qwen3MoeForCausalLM", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936, 40960),
            attention_bias=False, decoder_sparse_step=1, head_dim=128, max_window_layers=48,
            mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True, num_experts=128,
            num_experts_per_tok=8, output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None,
            rope_theta=1e6, router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False,
            use_sliding_window=False,
        ),
        {"head_size": 128, "windows": {None}},
    ),
    "Mixtral 8x7B": (
        _config(
            "MixtralForCausalLM", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768),
            num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5,
            rope_theta=1e6, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
        ),
        {"windows": {None}},
    ),
    "Gemma 2 9B": (
        _config(
            "Gemma2ForCausalLM", "gemma2", (3584, 14336, 42, 16, 8, 256000, 8192),
            attention_bias=False, attn_logit_softcapping=50.0, cache_implementation="hybrid",
            final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh", pad_token_id=0,
            hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-6,
            rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096,
        ),
        {"attention_softcap": 50.0, "windows": {4096, None}, "tie_word_embeddings": True},
    ),
    "Gemma 3 1B": (
        _config(
            "Gemma3ForCausalLM", "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768),
            attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
            final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
            pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000,
            rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6,
        ),
        {"windows": {512, None}, "tie_word_embeddings": True, "logit_softcap": None},
    ),
    "Phi-3 mini 4k": (
        _config(
            "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 32, 32, 32064, 4096),
            _name_or_path="Phi-3-mini-4k-instruct", attention_bias=False, embd_pdrop=0.0, resid_pdrop=0.0,
            auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, pad_token_id=32000,
            original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
            sliding_window=2047, tie_word_embeddings=False,
        ),
        {"windows": {2047}, "max_position": 4096},
    ),
    "Phi-4 mini, within its original context": (
        _config(
            "Phi3ForCausalLM", "phi3", (3072, 8192, 32, 24, 8, 200064, 131072),
            attention_bias=False, embd_pdrop=0.0, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False,
            mlp_bias=False, original_max_position_embeddings=4096, pad_token_id=199999, resid_pdrop=0.0,
            partial_rotary_factor=0.75, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=262144,
            rope_scaling={"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            tie_word_embeddings=True,
        ),
        {"max_position": 4096, "tie_word_embeddings": True, "head_size": 128},
    ),
}  # fmt: skip
