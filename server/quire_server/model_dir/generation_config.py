"""Reads generation_config.json: the tokens that end a text, and the model's own sampling defaults.

The file is not trusted: a value that makes no sense is a ModelCorruptError. Which parameters may have a
default of the model is declared in `core.sampling_params`.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire_server.core.sampling_params import Declaration, SamplingParams, declarations
from quire_server.errors import ModelCorruptError
from quire_server.model_dir.files import ModelFiles

_NAME = "generation_config.json"
_MAX_COUNT = 2**31


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling parameters of a request that sets none: OpenAI's, unless the model has others.

    ``max_tokens``: of chats, as far as the context allows.
    """

    sampling: SamplingParams = SamplingParams(max_tokens=0)
    max_tokens: int | None = None


def sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """The defaults that generation_config.json sets; `do_sample: false` is greedy by default."""
    if not files.exists(_NAME):
        return SamplingDefaults()
    settings = files.read_json(_NAME)
    values = {
        one.name: value
        for one in declarations()
        if one.field.model_default and (value := _model_default(settings, one)) is not None
    }
    if settings.get("do_sample") is False:
        values["temperature"] = 0.0
    max_tokens = int(_number(settings, "max_new_tokens", _MAX_COUNT) or 0) or None
    return SamplingDefaults(replace(SamplingDefaults().sampling, **values), max_tokens)


def _model_default(settings: dict[str, object], declared: Declaration) -> Any:
    """The model's default of one parameter; None where it has none, or 0 where 0 is out of bounds."""
    bounds = declared.field
    assert bounds.low is not None and bounds.high is not None
    value = _number(settings, declared.name, min(bounds.high, _MAX_COUNT))
    if value is None or (value == 0 and (bounds.above_low or bounds.low > 0)):
        return None
    return int(value) if declared.kind is int else value


def _number(settings: dict[str, object], name: str, high: float) -> float | None:
    value = settings.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise ModelCorruptError(f"{_NAME}: {name} must be a number between 0 and {high:g}.")
    return float(value)


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """From generation_config.json, else from config.json; either may have one id, several, or none."""
    for name in ("generation_config.json", "config.json"):
        if files.exists(name) and (value := files.read_json(name).get("eos_token_id")) is not None:
            return _ids(value, name)
    return ()


def _ids(value: Any, name: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if len(values) > 64 or not all(type(item) is int and 0 <= item < 1 << 31 for item in values):
        raise ModelCorruptError(f"{name}: eos_token_id is neither a token id nor a short list of them.")
    return tuple(sorted(set(values)))
