"""GGUF metadata -> the config.json of a Llama model.

Called by ``import_gguf``. Reads llama.cpp's keys, refuses what our Llama cannot compute, writes what
``models.config`` parses.
"""

from collections.abc import Mapping
from typing import Any

import gguf
import torch

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.models import rope, rope_config
from quire_server.models.fields import Fields
from quire_server.models.rope_config import Rope

ROPE_FACTORS = "rope_freqs.weight"

# GGUF keeps only the factors that Llama 3's scaling gave, not its parameters; these are the published ones.
_LLAMA3_SCALINGS = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


class Metadata:
    """The key-value part of a GGUF file, typed on the way out."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default when the key is absent."""
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except (ValueError, IndexError, UnicodeDecodeError):
            raise ModelCorruptError(f"GGUF key {key} cannot be read. Download the file again.") from None

    def need(self, key: str) -> Any:
        """The value; the file is useless without it."""
        value = self.get(key)
        if value is None:
            raise ModelCorruptError(f"The GGUF file has no {key}. Download it again, or convert it again.")
        return value


def config(metadata: Metadata, tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """config.json in the words of transformers."""
    architecture = metadata.need("general.architecture")
    if architecture != "llama" or metadata.get("llama.expert_count", 0):
        raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported: dense llama.")
    for name in ("token_embd.weight", "blk.0.ffn_gate.weight"):
        if name not in tensors:
            raise ModelCorruptError(f"The GGUF file has no tensor {name}. Download it again.")
    hidden = int(metadata.need("llama.embedding_length"))
    heads = int(metadata.need("llama.attention.head_count"))
    head_size = int(metadata.get("llama.attention.key_length", hidden // max(heads, 1)))
    theta = float(metadata.get("llama.rope.freq_base", 10000.0))
    biased = "blk.0.attn_q.bias" in tensors
    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    result = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(tensors["blk.0.ffn_gate.weight"].shape[1]),
        "num_hidden_layers": int(metadata.need("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_size,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": int(metadata.need("llama.context_length")),
        # llama.cpp stores float32; the nearest short decimal is what the model's author wrote.
        "rms_norm_eps": float(f"{metadata.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, tensors, head_size, theta),
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({int(token) for token in eos if token is not None}),
        "torch_dtype": "bfloat16",
    }
    if not result["eos_token_id"]:
        raise ModelCorruptError("The GGUF file names no end-of-text token (tokenizer.ggml.eos_token_id).")
    return result


def _rope_scaling(
    metadata: Metadata, tensors: Mapping[str, gguf.ReaderTensor], head_size: int, theta: float
) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata.need("llama.rope.scaling.factor"))}
    if kind != "none":
        raise ConfigError(f"RoPE scaling {kind!r} is not supported; supported: none, linear, llama3.")
    if ROPE_FACTORS not in tensors:
        return None
    factors = torch.from_numpy(tensors[ROPE_FACTORS].data.copy()).float()
    plain = rope.inverse_frequencies(Rope(head_size, theta))
    for scaling in _LLAMA3_SCALINGS:
        described = rope_config.parse_inner(Fields(scaling), head_size, 8192, theta=theta)
        scaled = rope.inverse_frequencies(described)
        if factors.shape == plain.shape and torch.allclose(plain / scaled, factors, rtol=1e-3):
            return scaling
    raise ConfigError("The GGUF file's RoPE factors are none of Llama 3's; this variant is not supported.")
