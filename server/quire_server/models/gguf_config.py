"""Converts GGUF metadata to config.json.

A table maps each architecture's keys to those of config.json. Keys that are neither in it nor known to be
harmless are refused, as ``models.config_fields`` does for config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.models import rope, rope_config
from quire_server.models.config_fields import ConfigFields
from quire_server.models.rope_config import Rope

ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_TENSORS = frozenset({ROPE_FACTORS, *_LONG_FACTORS.values()})  # converted to keys of config.json


@dataclass(frozen=True, slots=True)
class Family:
    """What llama.cpp's converter changes in an architecture, so that it can be reversed.

    ``settings``: key of config.json -> key of GGUF, if the file has it. ``flags``: key of config.json -> the
    tensor whose presence sets it. ``fixed``: what llama.cpp has in its code and not in the file.
    """

    architecture: str  # the name in transformers, like model_type
    model_type: str
    settings: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_interleaved_heads: bool = (
        False  # rows of q and k have rotary pairs side by side, not half a head apart
    )
    has_offset_norms: bool = False  # the file holds 1 + w
    widest: int | None = None  # Gemma: the model with this many layers scales scores by hidden / heads


_WINDOW = {"sliding_window": "attention.sliding_window"}
_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_PER_TOKEN = {"num_experts_per_tok": "expert_used_count"}
_MIXTRAL = "llama with experts"  # llama.cpp calls both llama

FAMILIES: Mapping[str, Family] = {
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", _WINDOW | _CAPS, fixed=_GELU, has_offset_norms=True, widest=46
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", "gemma3_text",
        _WINDOW | _CAPS | {"rope_local_base_freq": "rope.freq_base_swa"},
        fixed=_GELU,
        has_offset_norms=True,
        widest=62,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        flags=_BIAS | {"mlp_bias": "blk.0.ffn_gate.bias"},
        has_interleaved_heads=True,
    ),
    _MIXTRAL: Family(
        "MixtralForCausalLM", "mixtral",
        _PER_TOKEN | {"num_local_experts": "expert_count"},
        has_interleaved_heads=True,
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", _WINDOW),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", flags=_BIAS),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe",
        _PER_TOKEN | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
        flags=_BIAS,
        fixed={"norm_topk_prob": True},
    ),
}  # fmt: skip

_HARMLESS = frozenset(
    {"expert_count", "mm.tokens_per_image", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size"}
)

# GGUF stores only the resulting factors of Llama 3's scaling. These are the published parameters.
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
    """The key-value part of a GGUF file, with a record of the keys that were read."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self._asked: set[str] = set()
        self.architecture = str(self.need("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if the key is absent."""
        self._asked.add(key)
        found = self._fields.get(key)
        if found is None:
            return default
        try:
            return found.contents()
        except (ValueError, IndexError, UnicodeDecodeError):
            raise ModelCorruptError(f"GGUF key {key} cannot be read. Download the file again.") from None

    def need(self, key: str) -> Any:
        """The value of a required key."""
        value = self.get(key)
        if value is None:
            raise ModelCorruptError(f"The GGUF file has no {key}. Download it again, or convert it again.")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key that begins with the architecture's name."""
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, kind: type = int, default: Any = None) -> Any:
        """One number with the architecture's prefix; required unless there is a default."""
        name = f"{self.architecture}.{key}"
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, list | str) or not isinstance(value, int | float):
            raise ConfigError(
                f"GGUF key {name} is {str(value)[:40]!r}; supported: one number for all layers."
            )
        return kind(value)

    def refuse_unread(self) -> None:
        """Raises ConfigError if the architecture has a setting that was not read."""
        prefix = f"{self.architecture}."
        for key in sorted(self._fields.keys() - self._asked):
            if key.startswith(prefix) and key.removeprefix(prefix) not in _HARMLESS:
                raise ConfigError(
                    f"GGUF key {key[:80]} is not supported: it may change what the model computes. Serve the "
                    "model's safetensors release instead."
                )


def family(metadata: Metadata) -> Family:
    """The family of this file."""
    name = metadata.architecture
    if name == "llama" and metadata.own("expert_count", 0):
        name = _MIXTRAL
    if name not in FAMILIES:
        raise ConfigError(
            f"GGUF architecture {name[:60]!r} is not supported; supported: {', '.join(FAMILIES)}. Serve the "
            "model's safetensors release instead."
        )
    return FAMILIES[name]


def config(metadata: Metadata, tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """config.json in the format of transformers."""
    described = family(metadata)
    if "token_embd.weight" not in tensors:
        raise ModelCorruptError("The GGUF file has no tensor token_embd.weight. Download it again.")
    hidden, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    layers = metadata.number("block_count")
    head_size = metadata.number("attention.key_length", default=hidden // max(heads, 1))
    rotated = metadata.number("rope.dimension_count", default=head_size)
    if metadata.number("attention.value_length", default=head_size) != head_size:
        raise ConfigError("The GGUF file's keys and values differ in size, which is not supported.")
    theta = metadata.number("rope.freq_base", float, 10000.0)
    result: dict[str, Any] = {
        "architectures": [described.architecture],
        "model_type": described.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", default=heads),
        "head_dim": head_size,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": metadata.number("context_length"),
        # llama.cpp stores float32; the nearest short decimal is the model author's value.
        "rms_norm_eps": float(f"{metadata.number('attention.layer_norm_rms_epsilon', float):.6g}"),
        "rope_theta": theta,
        "partial_rotary_factor": rotated / max(head_size, 1),
        "rope_scaling": _rope_scaling(metadata, tensors, rotated, theta),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
    }
    result |= {**described.fixed, **_tokens(metadata)}
    for key, name in described.settings.items():
        if (value := metadata.own(name)) is not None:
            result[key] = value or None  # 0: disabled
    result |= {key: name in tensors for key, name in described.flags.items()}
    if described.widest is not None:
        result["query_pre_attn_scalar"] = hidden / max(heads, 1) if layers == described.widest else head_size
    original = metadata.own("rope.scaling.original_context_length")
    if described.architecture == "Phi3ForCausalLM" and original is not None:
        result["original_max_position_embeddings"] = original
    metadata.refuse_unread()
    return result


def _tokens(metadata: Metadata) -> dict[str, Any]:
    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = sorted({int(token) for token in eos if token is not None})
    if not ids:
        raise ModelCorruptError("The GGUF file names no end-of-text token (tokenizer.ggml.eos_token_id).")
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ids}


def _rope_scaling(
    metadata: Metadata, tensors: Mapping[str, gguf.ReaderTensor], rotated: int, theta: float
) -> dict[str, Any] | None:
    kind = metadata.own("rope.scaling.type", "none")
    metadata.own("rope.scaling.attn_factor")  # follows from the two contexts
    if all(name in tensors for name in _LONG_FACTORS.values()):
        factors = {key: tensors[name].data.tolist() for key, name in _LONG_FACTORS.items()}
        return {"rope_type": "longrope"} | factors
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", float)}
        if kind == "yarn":
            original = metadata.number("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return scaling
    if kind != "none":
        raise ConfigError(f"RoPE scaling {kind!r} is not supported; supported: none, linear, yarn.")
    return None if ROPE_FACTORS not in tensors else _llama3(tensors[ROPE_FACTORS], rotated, theta)


def _llama3(stored: gguf.ReaderTensor, rotated: int, theta: float) -> dict[str, Any]:
    factors = torch.from_numpy(stored.data.copy()).float()
    plain = rope.inverse_frequencies(Rope(rotated, theta))
    for scaling in _LLAMA3_SCALINGS:
        described = rope_config.parse_inner(ConfigFields(scaling), rotated, 8192, theta=theta)
        scaled = rope.inverse_frequencies(described)
        if factors.shape == plain.shape and torch.allclose(plain / scaled, factors, rtol=1e-3):
            return scaling
    raise ConfigError("The GGUF file's RoPE factors are none of Llama 3's; this variant is not supported.")
