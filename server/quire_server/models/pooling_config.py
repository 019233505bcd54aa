"""How the states of a text become its vector, from the files that sentence-transformers writes beside a
model: `modules.json`, `1_Pooling/config.json`, `sentence_bert_config.json`.

Only modules whose arithmetic is known are accepted. Knows no tensors.
"""

import json
from dataclasses import dataclass
from typing import Any

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.model_dir.files import MODULES, POOLING, SENTENCE_LENGTH, ModelFiles, check_values

POOLINGS = ("cls", "mean", "last")
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_LIMIT, _MAX_VALUES = 64 << 10, 1000


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """``pooling``: cls, mean or last. ``max_length``: of a text in tokens, None where the files say
    nothing.
    """

    pooling: str
    normalizes: bool
    max_length: int | None = None


def read(files: ModelFiles, *, default: str, override: str = "auto") -> PoolingConfig:
    """What the files say; without them ``default``, normalised. ``override``: of ``--pooling``. Raises
    ConfigError, ModelCorruptError.
    """
    found = _pooling(files)
    pooling = (found or default) if override == "auto" else override
    return PoolingConfig(pooling, _normalizes(files), _max_length(files))


def _pooling(files: ModelFiles) -> str | None:
    if not files.exists(POOLING):
        return None
    document = files.read_json(POOLING, _LIMIT)
    if document.get("pooling_mode") is not None:
        modes = [str(document["pooling_mode"]).replace("lasttoken", "last")]
    else:
        modes = [key for key in document if key.startswith("pooling_mode_") and document[key] is True]
        modes = [_MODES.get(key, key) for key in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigError(
            f"{POOLING}: {' and '.join(modes)[:100] or 'no pooling'} is not supported; supported: one of "
            f"{', '.join(POOLINGS)}. Choose one with --pooling after removing the file."
        )
    return modes[0]


def _normalizes(files: ModelFiles) -> bool:
    """Whether vectors have the length 1: as modules.json says, and without it yes."""
    if not files.exists(MODULES):
        return True
    data = files.read(MODULES, _LIMIT)
    check_values(data, MODULES, _MAX_VALUES)
    try:
        modules: Any = json.loads(data)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ModelCorruptError(f"{MODULES} is no list of modules. Download the model again.") from None
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ConfigError(
            f"{MODULES}: the module {unknown[0][:60]!r} is not supported, and it changes the vectors; "
            "supported: Transformer, Pooling, Normalize."
        )
    return "Normalize" in kinds


def _max_length(files: ModelFiles) -> int | None:
    if not files.exists(SENTENCE_LENGTH):
        return None
    length = files.read_json(SENTENCE_LENGTH, _LIMIT).get("max_seq_length")
    if length is None:
        return None
    if type(length) is not int or not 0 < length < 1 << 24:
        raise ModelCorruptError(f"{SENTENCE_LENGTH}: max_seq_length is no length. Download the model again.")
    return length
