"""config.json -> frozen ModelConfig, by a parser of our own.

Only the keys named here are looked at, each with a type and a range; whatever else the file holds
(``auto_map`` with its class paths above all) selects nothing and runs nothing. Keys that would change the
arithmetic in a way we do not implement are refused. Called by ``runner.model_runner`` and
``models.registry``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.core.generation import eos_token_ids
from quire_server.core.model_files import ModelFiles

_DTYPES = ("float32", "bfloat16", "float16")
_REMEDY = "Download or convert the model again."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the arithmetic needs to know of a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint


def load(files: ModelFiles) -> ModelConfig:
    """Parse the directory's config.json."""
    return parse(files.read_json("config.json"), eos_token_ids(files))


def parse(document: Mapping[str, Any], eos_ids: tuple[int, ...]) -> ModelConfig:
    """The checked configuration, or an error that names the key."""
    fields = _Fields(document)
    architectures = document.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
    ):
        raise ModelCorruptError(f"config.json: 'architectures' does not name one architecture. {_REMEDY}")
    _refuse_unsupported(document)
    hidden, heads = fields.integer("hidden_size", 1 << 17), fields.integer("num_attention_heads", 1 << 12)
    kv_heads = fields.integer("num_key_value_heads", 1 << 12, default=heads)
    head_size = fields.integer("head_dim", 1 << 12, default=hidden // heads)
    if heads % kv_heads or head_size % 2 or head_size == 0:
        raise ModelCorruptError(
            f"config.json: {heads} heads of size {head_size} cannot share {kv_heads} kv heads. {_REMEDY}"
        )
    max_position = fields.integer("max_position_embeddings", 1 << 24)
    rope = _rope(document)
    return ModelConfig(
        architecture=architectures[0],
        vocab_size=fields.integer("vocab_size", 1 << 22),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1 << 20),
        num_layers=fields.integer("num_hidden_layers", 1 << 10),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position=max_position,
        norm_eps=fields.number("rms_norm_eps", 1e-6, largest=1.0),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_scaling(rope, max_position),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_ids,
        dtype=_dtype(document),
    )


class _Fields:
    """Typed, ranged access; every complaint names the key and the file."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def integer(self, key: str, largest: int, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= largest:
            self._complain(key, value, f"a whole number from 1 to {largest}")
        return value

    def number(self, key: str, default: float | None = None, largest: float = 1e12) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            self._complain(key, value, f"a number above 0, at most {largest:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            self._complain(key, value, "true or false")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self._document.get(key)
        return default if value is None else value

    def _complain(self, key: str, value: object, expected: str) -> NoReturn:
        raise ModelCorruptError(f"config.json: {key!r} is {str(value)[:40]!r}, not {expected}. {_REMEDY}")


def _refuse_unsupported(document: Mapping[str, Any]) -> None:
    if document.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"hidden_act {str(document['hidden_act'])[:40]!r} is not supported; supported: silu."
        )
    if document.get("quantization_config") is not None:
        raise ConfigError(
            "The model is quantised; this server serves float checkpoints. Use the original model."
        )
    if document.get("sliding_window") is not None and document.get("use_sliding_window", True):
        raise ConfigError("Sliding-window attention is not supported. Serve a model without it.")


def _rope(document: Mapping[str, Any]) -> _Fields:
    """The rotary settings: ``rope_parameters`` of newer files, ``rope_scaling`` of older ones."""
    for key in ("rope_parameters", "rope_scaling"):
        value = document.get(key)
        if value is not None:
            if not isinstance(value, dict):
                raise ModelCorruptError(f"config.json: {key!r} is not an object. {_REMEDY}")
            return _Fields(value)
    return _Fields({})


def _scaling(rope: _Fields, max_position: int) -> Mapping[str, Any] | None:
    kind = rope._get("rope_type", rope._get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": rope.number("factor")}
    if kind == "llama3":
        scaling = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise ModelCorruptError(f"config.json: low_freq_factor must be below high_freq_factor. {_REMEDY}")
        original = rope.integer("original_max_position_embeddings", 1 << 24, default=max_position)
        return {"rope_type": kind, "original_max_position_embeddings": original} | scaling
    raise ConfigError(f"RoPE type {str(kind)[:40]!r} is not supported; supported: default, linear, llama3.")


def _dtype(document: Mapping[str, Any]) -> str:
    value = document.get("dtype", document.get("torch_dtype")) or "float32"
    if value not in _DTYPES:
        raise ConfigError(
            f"config.json: dtype {str(value)[:40]!r} is not supported; supported: {', '.join(_DTYPES)}."
        )
    return str(value)
