"""The sampling fields of a request, derived from the declarations of `core.sampling_params`.

A field that needs more than its declaration (a JSON object, the vocabulary, the request's other fields) is
completed here. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from quire_server.api.protocol.validation import (
    Boolean,
    Integer,
    Json,
    Number,
    RequestModel,
    TokenIds,
    Vocabulary,
    wrong,
)
from quire_server.core.sampling_params import Declaration, SamplingParams, declarations
from quire_server.model_dir.generation_config import SamplingDefaults

MAX_LOGPROBS = 20
_MAX_LOGIT_BIAS = 1024
_MAX_BIAS = 100.0
_DECLARED = declarations()


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object of biases by token id; sorted pairs of them."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -_MAX_BIAS, "maximum": _MAX_BIAS},
            "maxProperties": _MAX_LOGIT_BIAS,
        }

    def _check(self, value: object, info: Vocabulary) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > _MAX_LOGIT_BIAS:
            raise wrong(f"must be an object of at most {_MAX_LOGIT_BIAS} token ids")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10) or int(key) >= info.context:
                raise wrong(f"has a name that is no token id in 0..{info.context - 1}")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= _MAX_BIAS:
                raise wrong(f"must have numbers between {-_MAX_BIAS:g} and {_MAX_BIAS:g} as values")
            biases[int(key)] = float(bias)
        return tuple(sorted(biases.items()))


def _field(declared: Declaration) -> tuple[Any, Any]:
    """The annotation and the default of a request's field."""
    kind: Any = declared.kind
    return Annotated[kind, _bounds(declared), Field(description=declared.field.doc)], declared.default


def _bounds(declared: Declaration) -> Boolean | Integer | Number | TokenIds:
    kind, field = declared.kind, declared.field
    if kind is bool:
        return Boolean()
    if kind == tuple[int, ...]:
        assert field.max_items is not None
        return TokenIds(field.max_items, field.min_items)
    assert field.low is not None and field.high is not None
    if kind is float:
        return Number(field.low, field.high, field.above_low)
    return Integer(int(field.low), int(field.high))


_FIELDS: dict[str, Any] = {one.name: _field(one) for one in _DECLARED}
_Declared = create_model("_Declared", __base__=RequestModel, **_FIELDS)


class SamplingFields(_Declared):  # type: ignore[misc,valid-type]  # its fields are those of SamplingParams
    """How a token is chosen."""

    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        LogitBias(),
        Field(description="By token id, what is added to its logit."),
    ] = ()
    watermark: Annotated[
        bool | None, Boolean(), Field(description="Whether the answer gets a watermark; needs `--watermark`.")
    ] = None

    def sampling_params(
        self, defaults: SamplingDefaults, vocab_size: int, logprobs: int | None
    ) -> SamplingParams:
        """All but ``max_tokens``, ``bad_words`` and ``watermark``, which depend on more than the request."""
        given = {one.name: getattr(self, one.name) for one in _DECLARED if one.name in self.model_fields_set}
        asked = replace(defaults.sampling, **given, logit_bias=self.logit_bias, logprobs=logprobs)
        return replace(asked, top_k=min(max(asked.top_k, 0), vocab_size))
