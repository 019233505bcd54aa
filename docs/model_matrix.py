"""The page of feature combinations: what the parity matrix of the tests runs, and what the server's own
parser of config.json says to everything else.

Called by docs/generate.py. Nothing here is a claim of its own: "works" is a case of the tests, "refused" a
message of the parser.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.models import registry
from quire_server.models.config import ModelConfig
from tests.server.models import matrix
from tests.server.models.variants import SIZES, VARIANTS, WINDOW

HEAD = """# What works together

Made by `make docs` from the tests and from the server's own parser; the tests fail when it is out of date.

- **works**: run by the parity matrix (`tests/server/models/test_parity_matrix.py`): greedy output equal to
  `transformers` token for token (float32, CPU), log-probabilities within 1e-4. Every possible pair of values
  of the first two tables is in at least one case.
- **refused**: the server ends with a message that names the setting, before it loads anything.
- **untested**: the server accepts it, and no case of the matrix has it.
- **-**: not a setting of this family, or not possible.
"""

UNTESTED = """## Outside the matrix

- bfloat16: rounding differs between any two implementations, so tokens may differ from those of
  `transformers` where two are almost equally likely. Tested is that it strays no further from float32 than
  the bfloat16 of `transformers` does (within a factor of 4).
- GPUs: this release computes on the CPU.
- Contexts beyond a few hundred tokens: what is tested are lengths around blocks, windows and rope scalings.
"""


@dataclass(frozen=True)
class Setting:
    """``changes``: ways to say it in config.json; ``is_on``: whether a model has it."""

    name: str
    is_on: Callable[[ModelConfig], bool]
    changes: tuple[dict[str, Any], ...] = ({},)


def _ropes(kind: str, **more: Any) -> Setting:
    return Setting(
        f"RoPE scaling {kind}",
        lambda config: any(layer.rope.kind == kind for layer in config.layers),
        ({"rope_scaling": {"rope_type": kind, "factor": 4.0} | more},),
    )


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_LOCAL = ["sliding_attention", "full_attention"] * 3
_BASE = {"num_hidden_layers": 6, "head_dim": 16}
_UPPER = {"use_sliding_window": True, "sliding_window": WINDOW}

SETTINGS = (
    Setting("grouped-query attention", lambda c: 1 < c.num_kv_heads < c.num_heads),
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
        ({"sliding_window": WINDOW}, _UPPER | {"max_window_layers": 0}, _UPPER),
    ),
    Setting(
        "sliding window, some layers",
        lambda c: None in c.windows and len(c.windows) > 1,
        ({"sliding_window": WINDOW, "layer_types": _LOCAL}, _UPPER | {"max_window_layers": 3}),
    ),
    Setting(
        "soft cap on scores", lambda c: c.attention_softcap is not None, ({"attn_logit_softcapping": 4.0},)
    ),
    Setting("soft cap on logits", lambda c: c.logit_softcap is not None, ({"final_logit_softcapping": 4.0},)),
    Setting("experts", lambda c: c.experts is not None),
    _ropes("linear"),
    _ropes("llama3", **_LLAMA3),
    _ropes("yarn"),
    _ropes("longrope", **_LONG),
    _ropes("dynamic"),
    Setting(
        "rotation of a part of each head",
        lambda c: any(layer.rope.size < c.head_size for layer in c.layers),
        ({"partial_rotary_factor": 0.5},),
    ),
)

REFUSALS: dict[str, dict[str, Any]] = {
    "another architecture": {"architectures": ["MambaForCausalLM"]},
    "images and text": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "a quantised checkpoint": {"quantization_config": {"quant_method": "gptq"}},
    "another activation": {"hidden_act": "relu"},
    "another scaling of the rotation": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "a setting of another family": {"attn_logit_softcapping": 50.0},
    "a setting that this server has never seen": {"logits_scaling": 8.0},
    "an unknown kind of layer": {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["linear_attention"] * 6,
    },
}


def page() -> str:
    """docs/matrix.md."""
    covered = frozenset(pair for case in matrix.pairwise() for pair in matrix.pairs(case))
    run = functools.partial(_run, covered)
    sections = [
        HEAD,
        "## Families in all circumstances\n",
        _table(list(VARIANTS), _conditions(), run),
        "## Circumstances with each other\n",
        _table(_conditions(), _conditions(), run),
        "## Settings of config.json\n",
        _table(list(SETTINGS), sorted(registry.FAMILIES), _setting),
        "## What is refused, and how it says so\n",
        "| what | message |\n|---|---|\n" + "".join(_refusals()),
        UNTESTED,
    ]
    return "\n".join(sections)


def _conditions() -> list[tuple[str, str]]:
    return [(axis, value) for axis, values in matrix.AXES.items() if axis != "family" for value in values]


def _table(rows: list[Any], columns: list[Any], cell: Callable[[Any, Any], str]) -> str:
    lines = ["| |" + "".join(f" {_title(column)} |" for column in columns), "|---|" + "---|" * len(columns)]
    for row in rows:
        lines.append(f"| {_title(row)} |" + "".join(f" {cell(row, column)} |" for column in columns))
    return "\n".join(lines) + "\n"


def _title(item: Any) -> str:
    if isinstance(item, Setting):
        return item.name
    return item[1] if isinstance(item, tuple) else item.removesuffix("ForCausalLM")


def _run(covered: Collection[object], row: str | tuple[str, str], column: tuple[str, str]) -> str:
    first = ("family", row) if isinstance(row, str) else row
    pair = tuple(sorted((first, column)))
    if first[0] == column[0] or not matrix.is_possible(dict(pair)):
        return "-"
    return "works" if pair in covered else "untested"


def _document(architecture: str, *changes: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {"architectures": [architecture]} | SIZES
    for change in changes:
        document |= change
    return document


def _setting(setting: Setting, architecture: str) -> str:
    for prefix, settings in VARIANTS.values():
        if f"{prefix}ForCausalLM" == architecture:
            variant = registry.parse(_document(architecture, settings), ())
            if setting.is_on(variant):
                return "works"
    is_refused = False
    for change in setting.changes:
        try:
            if setting.is_on(registry.parse(_document(architecture, _BASE, change), ())):
                return "untested"
        except (ConfigError, ModelCorruptError):
            is_refused = True
    return "refused" if is_refused else "-"


def _refusals() -> Iterator[str]:
    for what, change in REFUSALS.items():
        try:
            registry.parse(_document("LlamaForCausalLM", _BASE, change), ())
        except (ConfigError, ModelCorruptError) as error:
            yield f"| {what} | {str(error).replace('|', chr(92) + '|')} |\n"
        else:
            raise AssertionError(f"the page says that {what} is refused, and it is not")
