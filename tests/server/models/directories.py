"""A good model directory written by hand, and ways to damage it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
SHAPES = {"model.embed_tokens.weight": (31, 16), "model.norm.weight": (16,)} | {
    f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def header(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    result, offset = {}, 0
    for name, array in arrays.items():
        offsets = [offset, offset + array.nbytes]
        result[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        offset = offsets[1]
    return result


def safetensors(entries: dict[str, Any], data: bytes) -> bytes:
    encoded = json.dumps(entries).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def write(
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Any]], object] = lambda entries: None,
) -> Path:
    """``config`` overrides keys of config.json (None removes one); ``change`` edits the header."""
    directory.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in (CONFIG | (config or {})).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(merged))
    arrays = tensors()
    entries = header(arrays)
    change(entries)
    data = b"".join(array.tobytes() for array in arrays.values())
    (directory / "model.safetensors").write_bytes(safetensors(entries, data))
    return directory
