"""Which tokens end a text, as the model's files say. Called by the tokenizer and the model configuration."""

from typing import Any

from quire_server.core.errors import ModelCorruptError
from quire_server.core.model_files import ModelFiles


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """generation_config.json decides, else config.json; either may name one id or several, or none."""
    for name in ("generation_config.json", "config.json"):
        if files.exists(name) and (value := files.read_json(name).get("eos_token_id")) is not None:
            return _ids(value, name)
    return ()


def _ids(value: Any, name: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if len(values) > 64 or not all(type(item) is int and 0 <= item < 1 << 31 for item in values):
        raise ModelCorruptError(f"{name}: eos_token_id is neither a token id nor a short list of them.")
    return tuple(sorted(set(values)))
