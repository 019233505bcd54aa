"""How a model wants to be sampled when the client says nothing: its generation_config.json.

Read once by the API process; `generation_fields` takes what the client leaves open from here. Tokens that end
an answer are the model's business whatever the defaults, see `core.generation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.core.errors import ModelCorruptError
from quire_server.core.model_files import ModelFiles

_NAME = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """OpenAI's, unless the model has others. ``max_tokens``: of chats, as far as the context allows."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


def sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """What generation_config.json sets; a model that says `do_sample: false` is greedy by default."""
    if not files.exists(_NAME):
        return SamplingDefaults()
    settings = files.read_json(_NAME)
    default = SamplingDefaults()
    temperature = _number(settings, "temperature", default.temperature, 2.0)
    return SamplingDefaults(
        temperature=0.0 if settings.get("do_sample") is False else temperature,
        top_p=_number(settings, "top_p", default.top_p, 1.0) or default.top_p,
        top_k=int(_number(settings, "top_k", default.top_k, 2**31)),
        min_p=_number(settings, "min_p", default.min_p, 1.0),
        repetition_penalty=_number(settings, "repetition_penalty", 1.0, 10.0) or 1.0,
        max_tokens=int(_number(settings, "max_new_tokens", 0, 2**31)) or None,
    )


def _number(settings: dict[str, object], name: str, default: float, high: float) -> float:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise ModelCorruptError(f"{_NAME}: {name} must be a number between 0 and {high:g}.")
    return float(value)
