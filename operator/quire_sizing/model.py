"""ModelShape: the dimensions that memory depends on, read from a checkpoint's config.json.

Counts the parameters of the families that the server runs. Knows no accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_sizing.errors import SizingError

_BIASED = {"qwen2"}  # families whose QKV biases are not in config.json
_HEAD_NORMS = {"qwen3", "qwen3_moe", "gemma3_text"}
_FOUR_NORMS = {"gemma2", "gemma3_text"}  # before and after attention and MLP
_TIED = {"gemma", "gemma2", "gemma3_text"}  # transformers' default where config.json has none
_MOST = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """``parameters``: the number of weights; ``longest``: the positions that the model was trained for."""

    parameters: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    longest: int


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The model of a config.json. Raises SizingError, which names the key that is missing or not a number."""
    hidden, layers = _whole(config, "hidden_size"), _whole(config, "num_hidden_layers")
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_size = _whole(config, "head_dim", hidden // heads)
    vocab = _whole(config, "vocab_size")
    family = str(config.get("model_type", ""))
    tied = bool(config.get("tie_word_embeddings", family in _TIED))
    attention = _attention(config, family, (hidden, heads * head_size, kv_heads * head_size), head_size)
    norms = (4 if family in _FOUR_NORMS else 2) * hidden
    parameters = layers * (attention + norms) + _feed_forward(config, hidden, layers)
    parameters += vocab * hidden * (1 if tied else 2) + hidden
    return ModelShape(
        parameters=parameters,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_size=head_size,
        hidden_size=hidden,
        vocab_size=vocab,
        longest=_whole(config, "max_position_embeddings"),
    )


def _attention(config: Mapping[str, Any], family: str, widths: tuple[int, int, int], head_size: int) -> int:
    """Parameters of one layer; the widths are those of the residual stream, of all queries, and of all
    keys.
    """
    hidden, queries, keys = widths
    count = 2 * hidden * queries + 2 * hidden * keys
    if config.get("attention_bias"):
        count += queries + 2 * keys + hidden
    elif family in _BIASED:
        count += queries + 2 * keys
    return count + (2 * head_size if family in _HEAD_NORMS else 0)


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> int:
    """Parameters of all layers, sparse ones with all their experts."""
    dense = 3 * hidden * _whole(config, "intermediate_size")
    if config.get("mlp_bias"):
        dense += 2 * _whole(config, "intermediate_size") + hidden
    key = next((key for key in ("num_local_experts", "num_experts") if config.get(key)), "")
    if not key:
        return layers * dense
    experts = _whole(config, key)
    inner = _whole(config, "moe_intermediate_size", _whole(config, "intermediate_size"))
    sparse = experts * 3 * hidden * inner + hidden * experts
    every, skipped = _whole(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    num_sparse = sum((layer + 1) % every == 0 and layer not in skipped for layer in range(layers))
    return num_sparse * sparse + (layers - num_sparse) * dense


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise SizingError(
            f"config.json: {key} is {value!r}; give the config.json of a text model, where it is above 0."
        )
    return value
