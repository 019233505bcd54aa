"""Typed and bounded access to an untrusted JSON object, with a record of the keys that were read.

The model families read config.json only through this. A key that was not read, and that is not known to be
harmless, is refused by name: a model is computed as its author defined it or not at all. Knows nothing of
models.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from quire_server.errors import ConfigError, ModelCorruptError

REMEDY = "Download or convert the model again."

# Metadata, settings of training and sampling, and names of code that is never run.
_HARMLESS = frozenset(
    [
        "architectures", "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens",
        "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
        "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout",
        "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id",
        "length_penalty", "license", "max_length", "min_length", "mlp_dropout", "model_type",
        "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels",
        "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
        "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
        "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
        "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id",
        "suppress_tokens", "task_specific_params", "temperature", "tokenizer_class", "top_k",
        "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
        "typical_p", "unsloth_fixed", "unsloth_version", "use_cache",
    ]
)  # fmt: skip
# Keys that change the arithmetic, except at this value.
_NEUTRAL: Mapping[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}


class ConfigFields:
    """One JSON object; every error names the key and the file. An explicit null is an absent value."""

    def __init__(self, document: Mapping[str, Any], where: str = "config.json") -> None:
        self._document, self.where, self._asked = document, where, set[str]()

    def integer(self, key: str, largest: int, default: int | None = None, *, smallest: int = 1) -> int:
        """A whole number from smallest to largest; required unless there is a default."""
        value = self._get(key, default)
        if type(value) is not int or not smallest <= value <= largest:
            self.raise_invalid(key, f"a whole number from {smallest} to {largest}")
        return value

    def number(self, key: str, default: float | None = None, *, largest: float = 1e12) -> float:
        """A number above 0; required unless there is a default."""
        value = self._get(key, default)
        if not _is_number(value) or not 0 < value <= largest:
            self.raise_invalid(key, f"a number above 0, at most {largest:g}")
        return float(value)

    def optional_integer(self, key: str, largest: int, *, absent: int | None = None) -> int | None:
        """None if the value is null, ``absent`` if the key is missing."""
        value = self._get(key, None) if key in self._document else absent
        return None if value is None else self.integer(key, largest, value)

    def optional_number(self, key: str, *, absent: float | None = None) -> float | None:
        """None if the value is null, ``absent`` if the key is missing."""
        value = self._get(key, None) if key in self._document else absent
        return None if value is None else self.number(key, value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.raise_invalid(key, "true or false")
        return value

    def choice(self, key: str, options: Collection[str], default: str) -> str:
        """One of the options. Another value is a ConfigError, because it is not damage but not supported."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in options:
            raise ConfigError(
                f"{self.where}: {key} {str(value)[:40]!r} is not supported; supported: {', '.join(options)}."
            )
        return value

    def items(self, key: str, kind: type, length: int) -> list[Any] | None:
        """A list of ``length`` values of one type (float: numbers above 0); None if absent."""
        value = self._get(key, None)
        if value is None:
            return None
        is_right = isinstance(value, list) and len(value) == length
        if not is_right or not all(
            _is_number(item) and 0 < item < 1e12 if kind is float else type(item) is kind for item in value
        ):
            self.raise_invalid(key, f"a list of {length} of type {kind.__name__}")
        return list(value)

    def strings(self, key: str) -> list[str]:
        """A list of strings of any length; empty if absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.raise_invalid(key, "a list of names")
        return value

    def keys(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._document)

    def has(self, key: str) -> bool:
        """Whether the key exists, even with the value null."""
        return key in self._document

    def inner(self, key: str) -> "ConfigFields | None":
        """An object inside this one."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.raise_invalid(key, "an object")
        return ConfigFields(value, f"{self.where}: {key}")

    def raw(self, key: str) -> Any:
        """The value, unchecked."""
        return self._get(key, None)

    def refuse_unread(self, harmless: Collection[str] = ()) -> None:
        """Call it last. Raises ConfigError if a key was not read and may change the arithmetic."""
        for key in sorted(self._document.keys() - self._asked - _HARMLESS - set(harmless)):
            value = self._document[key]
            is_neutral = value is None or (key in _NEUTRAL and value == _NEUTRAL[key])
            if not is_neutral and not key.startswith("_"):
                raise ConfigError(
                    f"{self.where}: {key[:60]!r} = {str(value)[:40]!r} is not supported. This server does "
                    "not know the setting, and it may change what the model computes; if not, remove it."
                )

    def raise_invalid(self, key: str, expected: str) -> NoReturn:
        """Raise ModelCorruptError: the value is not what was expected."""
        value = self._document.get(key)
        raise ModelCorruptError(f"{self.where}: {key!r} is {str(value)[:40]!r}, not {expected}. {REMEDY}")

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self._document.get(key)
        return default if value is None else value


def layer_types(fields: ConfigFields, num_layers: int) -> Sequence[str] | None:
    """The type of each layer (sliding or full attention), if the file lists them."""
    types = fields.items("layer_types", str, num_layers)
    if types is not None and (unknown := set(types) - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"config.json: layer_types {min(unknown)[:40]!r} is not supported; supported: full_attention, "
            "sliding_attention."
        )
    return types


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
