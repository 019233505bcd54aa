"""The entries of a model's config.json from which its size in memory follows, for /statusz.

Read once by the health process, before the weights are loaded: the operator computes from them whether the
model fits the accelerator. Reports no errors: a directory without a model gives no entries, and the engine
reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire_server.errors import QuireServerError
from quire_server.model_dir.files import ModelFiles

KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "intermediate_size",
    "mlp_bias",
    "num_local_experts",
    "num_experts",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "max_position_embeddings",
)
_QUANTIZATION = "quantization_config"
#: Of quantization_config, and within it: what decides whether a GPU dequantises the weights.
_OF_WEIGHTS = frozenset(
    ["quant_method", "weight_block_size", "group_size", "q_group_size", "format", "num_bits", "type",
     "strategy", "symmetric", "dynamic"]
)  # fmt: skip
_LONGEST_LIST = 512
_LONGEST_TEXT = 64

Entries = Mapping[str, object]


def read(directory: Path) -> Entries:
    """The entries that exist and are small; none without a readable config.json."""
    try:
        config = ModelFiles.open(directory).read_json("config.json")
    except (QuireServerError, OSError):
        return {}
    found = _small(config, frozenset(KEYS))
    stored = config.get(_QUANTIZATION)
    return {**found, _QUANTIZATION: _format(stored)} if isinstance(stored, dict) else found


def _format(stored: Entries) -> Entries:
    """The format of quantised weights. The server refuses files with several groups of settings."""
    groups, found = stored.get("config_groups"), _small(stored, _OF_WEIGHTS)
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    if not isinstance(group, dict):
        return found
    parts = {
        name: group[name] for name in ("weights", "input_activations") if isinstance(group.get(name), dict)
    }
    of_parts = {name: _small(part, _OF_WEIGHTS) for name, part in parts.items()}
    return {**found, "config_groups": {"group_0": {**_small(group, _OF_WEIGHTS), **of_parts}}}


def _small(given: Entries, keys: frozenset[str]) -> dict[str, object]:
    return {key: value for key, value in given.items() if key in keys and _is_small(value)}


def _is_small(value: object) -> bool:
    match value:
        case bool() | int():
            return abs(value) < 1 << 40
        case str():
            return len(value) <= _LONGEST_TEXT
        case list():
            return len(value) <= _LONGEST_LIST and all(isinstance(item, int) for item in value)
        case _:
            return False
