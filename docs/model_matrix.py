"""The page of feature combinations: what the parity matrix of the tests runs, and what the server's own
parser of config.json says to everything else.

Called by docs/generate.py. Nothing here is a claim of its own: "works" is a case of the tests, "refused" a
message of the parser, "untested" a pair that no test names; a cell that is none of them is a setting that the
family does not have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.models import registry
from tests.server import feature_pairs
from tests.server.models import matrix, quantized_matrix, settings
from tests.server.models.variants import VARIANTS

_ROOT = Path(__file__).parent.parent

HEAD = """# What works together

Made by `make docs` from the tests and from the server's own parser; the tests fail when it is out of date.

- **works**: run by a test: greedy output equal to `transformers` token for token (float32, CPU),
  log-probabilities within 1e-4. Every possible pair of values of the first two tables is in at least one case
  of `tests/server/models/test_parity_matrix.py`; each cell of the third is a variant of that matrix, or a
  model of `test_settings_parity.py`, which runs it in chunks, in a batch and swapped out and in.
- **refused**: the server ends with a message that names the setting, before it loads anything.
- **untested**: no test combines the two, see [Features with each other](#features-with-each-other).
- **-**: not a setting of this family, or not possible.
"""

QUANTISED = """## Quantised checkpoints

Each cell is a case of `tests/server/runner/test_quantized_families.py`. The matrices of a small model,
experts one by one, are quantised by auto-round (GPTQ, AWQ), transformers (FP8 by tensor, by block) or
compressed-tensors (the others), and read back by the same package; the server answers as `transformers` does
with those weights, token for token, in chunks, in a batch, swapped out and in. In the last two columns it
answers as with the float model of these weights over the same cache; each family and each format is in
at least one case for each dtype. Routers are left as they are, in all formats.

Without quantised weights, every family of the first table is run over both caches, too
(`tests/server/runner/test_kv_cache_dtypes.py`): in chunks, in a batch and swapped, log-probabilities stay
within 0.05 of those of each request alone. That is no token-for-token promise, see
[Quantised models and caches](quantization.md).
"""

FEATURES = """## Features with each other

From `tests/server/feature_pairs.py`, which names the test of each combination.

- **works**: a test runs the two together, with a model, and compares the answers.
- **scheduled**: random runs of the scheduler have both (order, progress, accounts of blocks), with answers
  that are made up; no test compares those of a model.
- **refused**: the server ends with a message, see the test.
- **untested**: no test combines the two. They are accepted together, and nothing is known against it.
- **-**: two values of one setting.

Refused as well is what lacks another: a disk tier or swapping without a host tier, `priority` in a request
without priorities, `watermark` without a key.
"""

UNTESTED = """## Outside the matrix

- bfloat16: rounding differs between any two implementations, so tokens may differ from those of
  `transformers` where two are almost equally likely. Tested is that it strays no further from float32 than
  the bfloat16 of `transformers` does (within a factor of 4).
- GPUs: [what is there](gpu.md) has not been run on one.
- Contexts beyond a few hundred tokens: what is tested are lengths around blocks, windows and rope scalings.
"""


REFUSALS: dict[str, dict[str, Any]] = {
    "another architecture": {"architectures": ["MambaForCausalLM"]},
    "images and text": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "another kind of quantised checkpoint": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "another activation": {"hidden_act": "relu"},
    "another scaling of the rotation": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "a setting of another family": {"attn_logit_softcapping": 50.0},
    "a setting that this server has never seen": {"logits_scaling": 8.0},
    "an unknown kind of layer": {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": ["linear_attention"] * 3,
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
        _table(list(settings.SETTINGS), list(settings.FAMILIES), _setting),
        QUANTISED,
        _table(list(quantized_matrix.FORMATS), _quantised_columns(), lambda row, column: "works"),
        FEATURES,
        _table(list(feature_pairs.FEATURES), list(feature_pairs.FEATURES), _feature_cell()),
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
    if isinstance(item, settings.Setting):
        return item.name
    return item[1] if isinstance(item, tuple) else str(item)


def _run(covered: Collection[object], row: str | tuple[str, str], column: tuple[str, str]) -> str:
    first = ("family", row) if isinstance(row, str) else row
    pair = tuple(sorted((first, column)))
    if first[0] == column[0] or not matrix.is_possible(dict(pair)):
        return "-"
    if pair not in covered:
        raise AssertionError(f"no case of the matrix has {pair}")
    return "works"


def _setting(setting: settings.Setting, family: str) -> str:
    found = settings.cell(setting, family)
    return "works" if isinstance(found, dict) or found == "matrix" else found


def _feature_cell() -> Callable[[str, str], str]:
    for (path, name), features in (
        *feature_pairs.WORKS,
        *feature_pairs.SCHEDULED,
        *feature_pairs.REFUSED,
    ):
        if not re.search(rf"^(def|class) {name}\b", (_ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
            raise AssertionError(f"{path} has no {name}, which is said to combine {', '.join(features)}")
    exclusive = set(map(frozenset, feature_pairs.EXCLUSIVE))
    told = {
        word: set(feature_pairs.pairs(entries))
        for word, entries in (
            ("works", feature_pairs.WORKS),
            ("scheduled", feature_pairs.SCHEDULED),
            ("refused", feature_pairs.REFUSED),
        )
    }

    def cell(row: str, column: str) -> str:
        pair = frozenset((row, column))
        if row == column or pair in exclusive:
            return "-"
        return next((word for word, pairs in told.items() if pair in pairs), "untested")

    return cell


def _quantised_columns() -> list[str]:
    caches = [f"{dtype} KV cache" for dtype in quantized_matrix.KV_DTYPES]
    return [*quantized_matrix.FAMILIES, *caches]


def _refusals() -> Iterator[str]:
    for what, change in REFUSALS.items():
        try:
            registry.parse(settings.document("Llama", change), ())
        except (ConfigError, ModelCorruptError) as error:
            yield f"| {what} | {str(error).replace('|', chr(92) + '|')} |\n"
        else:
            raise AssertionError(f"the page says that {what} is refused, and it is not")
