"""A Llama of one layer that repeats its prompt: each next token is the one PERIOD places before it.

What a request's answer says was therefore read from the KV cache of its own prompt, or of another's, if the
server mixes them up. One attention head looks PERIOD - 1 tokens back: its query is a constant, and so is its
key, turned so that RoPE aligns the two at that distance.
"""

import numpy as np

from tests.server import tiny_model

PERIOD = 24
_CODE = 63  # dimensions of a token's code; one more is the constant that queries and keys are made of
_HEAD = 64
_HIDDEN = 2 * _HEAD  # a token's code and the constant; the code that attention found
_SHARPNESS, _LOGIT_SCALE, _THETA = 400.0, 200.0, 10_000.0


def write(directory):
    """Write the model; returns the directory."""
    shape = {
        "hidden_size": _HIDDEN,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
    }
    return tiny_model.write_llama(directory, shape, _weights)


def _weights(vocab_size):
    codes = np.random.default_rng(0).choice([-1.0, 1.0], (vocab_size, _CODE))
    embedding, head = np.zeros((2, vocab_size, _HIDDEN))
    embedding[:, :_CODE], embedding[:, _CODE] = codes, 1
    head[:, _HEAD : _HEAD + _CODE] = codes * _LOGIT_SCALE / _CODE
    query, key, value = np.zeros((3, _HEAD, _HIDDEN))
    angles = (PERIOD - 1) * _THETA ** (-np.arange(_HEAD // 2) / (_HEAD // 2))
    query[: _HEAD // 2, _CODE] = 1
    key[:, _CODE] = np.concatenate([np.cos(angles), np.sin(angles)])
    query, key = query * _SHARPNESS**0.5, key * _SHARPNESS**0.5
    value[:_CODE, :_CODE] = np.eye(_CODE)
    output = np.zeros((_HIDDEN, _HEAD))
    output[_HEAD : _HEAD + _CODE, :_CODE] = np.eye(_CODE)
    ones, mlp = np.ones(_HIDDEN), np.zeros((32, _HIDDEN))
    layer = {
        "input_layernorm": ones,
        "post_attention_layernorm": ones,
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": output,
        "mlp.gate_proj": mlp,
        "mlp.up_proj": mlp,
        "mlp.down_proj": mlp.T,
    }
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": head,
        **{f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()},
    }
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in weights.items()}
