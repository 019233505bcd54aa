"""Settings of config.json and the families that have them, for test_settings_parity and the generated page of
feature combinations.

A cell is a family with a setting. Cells that the parity matrix's variants do not cover get models here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.models import registry
from quire_server.models.config import ModelConfig
from tests.server.models.variants import SIZES, VARIANTS, WINDOW


@dataclass(frozen=True)
class Setting:
    """``changes``: ways to write it in config.json; ``is_on``: whether a model has it."""

    name: str
    is_on: Callable[[ModelConfig], bool]
    changes: tuple[dict[str, Any], ...] = ({},)


def _ropes(kind: str, **more: Any) -> Setting:
    return Setting(
        f"RoPE scaling {kind}",
        lambda config: any(layer.rope.kind == kind for layer in config.layers),
        ({"rope_scaling": {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0} | more},),
    )


_ORIGINAL = {"original_max_position_embeddings": 32}
_LLAMA3 = _ORIGINAL | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 160,
}
_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
_SWITCHED_ON = {"use_sliding_window": True, "sliding_window": WINDOW}

SETTINGS = (
    Setting(
        "grouped-query attention", lambda c: 1 < c.num_kv_heads < c.num_heads, ({"num_key_value_heads": 2},)
    ),
    Setting("multi-query attention", lambda c: c.num_kv_heads == 1, ({"num_key_value_heads": 1},)),
    Setting(
        "head size of its own", lambda c: c.head_size * c.num_heads != c.hidden_size, ({"head_dim": 24},)
    ),
    Setting("tied embeddings", lambda c: c.tie_word_embeddings, ({"tie_word_embeddings": True},)),
    Setting("untied embeddings", lambda c: not c.tie_word_embeddings, ({"tie_word_embeddings": False},)),
    Setting("biases on q, k and v", lambda c: c.qkv_bias, ({"attention_bias": True}, {})),
    Setting("biases in the MLP", lambda c: c.mlp_bias, ({"mlp_bias": True},)),
    Setting("norms of query and key heads", lambda c: c.has_head_norms),
    Setting(
        "sliding window, all layers",
        lambda c: None not in c.windows,
        (
            {"sliding_window": WINDOW},
            {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3},
            _SWITCHED_ON | {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 3},
            _SWITCHED_ON,
        ),
    ),
    Setting(
        "sliding window, some layers",
        lambda c: None in c.windows and len(c.windows) > 1,
        (
            {"sliding_window": WINDOW, "layer_types": _LOCAL},
            _SWITCHED_ON | {"max_window_layers": 1, "layer_types": ["full_attention", *_LOCAL[::2]]},
        ),
    ),
    Setting(
        "soft cap on scores", lambda c: c.attention_softcap is not None, ({"attn_logit_softcapping": 4.0},)
    ),
    Setting("soft cap on logits", lambda c: c.logit_softcap is not None, ({"final_logit_softcapping": 4.0},)),
    Setting("experts", lambda c: c.experts is not None),
    _ropes("linear"),
    _ropes("llama3", **_LLAMA3),
    _ropes("yarn", **_ORIGINAL),
    _ropes("longrope", **_LONG),
    _ropes("dynamic"),
    Setting(
        "rotation of a part of each head",
        lambda c: any(layer.rope.size < c.head_size for layer in c.layers),
        ({"partial_rotary_factor": 0.5},),
    ),
)

FAMILIES = tuple(name.removesuffix("ForCausalLM") for name in sorted(registry.FAMILIES))


_PER_TOKEN = {"num_experts_per_tok": 2}
_GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": WINDOW}
_BASE: dict[str, dict[str, Any]] = {
    "Gemma2": _GEMMA,
    "Gemma3": _GEMMA | {"layer_types": _LOCAL},
    "Mixtral": _PER_TOKEN | {"num_local_experts": 4},
    "Qwen3Moe": _PER_TOKEN | {"num_experts": 4, "moe_intermediate_size": 48},
}


def document(family: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """config.json of a small model."""
    merged = {"architectures": [f"{family}ForCausalLM"], **SIZES, **base(family)}
    for change in changes:
        merged |= change
    return merged


def base(family: str) -> dict[str, Any]:
    """Settings with which a small model of the family outputs more than one token."""
    return {"head_dim": 16, **_BASE.get(family, {})}


def cell(setting: Setting, family: str) -> str | dict[str, Any]:
    """The settings of a model to run, or why there is none: "matrix" (a variant of the parity matrix has it),
    "refused", or "-" (the family does not know the setting).
    """
    for prefix, settings in VARIANTS.values():
        if prefix == family and setting.is_on(registry.parse(document(family, settings), ())):
            return "matrix"
    answer = "-"
    for change in setting.changes:
        try:
            if setting.is_on(registry.parse(document(family, change), ())):
                return base(family) | change
        except (ConfigError, ModelCorruptError):
            answer = "refused"
    return answer


def models() -> dict[tuple[str, str], dict[str, Any]]:
    """(setting, family) -> settings of the models that the matrix does not cover."""
    cells = {(setting.name, family): cell(setting, family) for setting in SETTINGS for family in FAMILIES}
    return {key: found for key, found in cells.items() if isinstance(found, dict)}
