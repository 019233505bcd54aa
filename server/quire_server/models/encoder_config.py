"""Configuration of bidirectional encoders: BERT, RoBERTa and XLM-RoBERTa, as embedders and as cross-encoders.

They share one block and differ in the names of their tensors, in where positions begin, and in the head of a
cross-encoder. As for decoders, a key that was not read and may change the arithmetic is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.models.config_fields import REMEDY, ConfigFields

_DTYPES = ("float32", "bfloat16", "float16")
# Of the checkpoint, and without an effect on the states of the last layer.
_HARMLESS = ("classifier_dropout", "gradient_checkpointing", "attention_probs_dropout_prob",
             "hidden_dropout_prob", "directionality", "pooler_fc_size", "pooler_num_attention_heads",
             "pooler_num_fc_layers", "pooler_size_per_head",
             "pooler_type", "tie_word_embeddings")  # fmt: skip
_MAX_LAYERS, _MAX_POSITION = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A checked encoder. ``first_position``: the number of the first token's position embedding. ``prefix``:
    of the encoder's tensors in the checkpoint. ``head``: bert or roberta for a cross-encoder, else empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int  # longest text, in tokens
    first_position: int
    type_vocab_size: int
    norm_eps: float
    activation: str
    dtype: str  # of the checkpoint
    prefix: str = ""
    head: str = ""
    has_sigmoid: bool = True  # of a cross-encoder's score
    eos_token_ids: tuple[int, ...] = ()

    @property
    def head_size(self) -> int:
        """Of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def position_rows(self) -> int:
        """Rows of the table of position embeddings."""
        return self.first_position + self.max_position


def _bert(fields: ConfigFields, *, prefix: str = "", head: str = "") -> EncoderConfig:
    return _common(fields, first_position=0, prefix=prefix, head=head)


def _roberta(fields: ConfigFields, *, prefix: str = "", head: str = "") -> EncoderConfig:
    padding = fields.integer("pad_token_id", _MAX_POSITION, 1, smallest=0)
    return _common(fields, first_position=padding + 1, prefix=prefix, head=head)


#: By architecture: how its configuration is read.
ENCODERS = {
    "BertModel": _bert,
    "RobertaModel": _roberta,
    "XLMRobertaModel": _roberta,
    "BertForSequenceClassification": lambda fields: _bert(fields, prefix="bert.", head="bert"),
    "RobertaForSequenceClassification": lambda fields: _roberta(fields, prefix="roberta.", head="roberta"),
    "XLMRobertaForSequenceClassification": lambda fields: _roberta(fields, prefix="roberta.", head="roberta"),
}


def parse(document: Mapping[str, Any]) -> EncoderConfig:
    """The checked configuration of an architecture in ``ENCODERS``. Raises ConfigError or
    ModelCorruptError.
    """
    fields = ConfigFields(document)
    config = ENCODERS[document["architectures"][0]](fields)
    fields.refuse_unread(_HARMLESS)
    return config


def _common(fields: ConfigFields, *, first_position: int, prefix: str, head: str) -> EncoderConfig:
    hidden, heads = fields.integer("hidden_size", 1 << 17), fields.integer("num_attention_heads", 1 << 12)
    rows = fields.integer("max_position_embeddings", _MAX_POSITION)
    if hidden % heads or rows <= first_position:
        raise ModelCorruptError(
            f"config.json: {heads} heads of {hidden} numbers and {rows} positions make no encoder. {REMEDY}"
        )
    fields.choice("position_embedding_type", ("absolute",), "absolute")
    if fields.flag("is_decoder"):
        raise ConfigError("config.json: is_decoder is true, and only encoders of this family are supported.")
    if head:
        _check_labels(fields)
    return EncoderConfig(
        architecture=fields.raw("architectures")[0],
        vocab_size=fields.integer("vocab_size", 1 << 22),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1 << 20),
        num_layers=fields.integer("num_hidden_layers", _MAX_LAYERS),
        num_heads=heads,
        max_position=rows - first_position,
        first_position=first_position,
        type_vocab_size=fields.integer("type_vocab_size", 1 << 10, 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12, largest=1.0),
        activation=fields.choice("hidden_act", ("gelu", "gelu_new", "relu"), "gelu"),
        dtype=fields.choice("dtype" if fields.has("dtype") else "torch_dtype", _DTYPES, "float32"),
        prefix=prefix,
        head=head,
        has_sigmoid=not _names_identity(fields),
    )


def _check_labels(fields: ConfigFields) -> None:
    """Only one number for a pair is a score."""
    labels = fields.raw("id2label")
    count = len(labels) if isinstance(labels, dict) else fields.integer("num_labels", 1 << 20, 2)
    if count != 1:
        raise ConfigError(
            f"config.json: the model has {count} labels, and a cross-encoder that scores pairs has one: "
            "serve a reranker."
        )


def _names_identity(fields: ConfigFields) -> bool:
    """Whether sentence-transformers' entry says that the score is the head's output as it is."""
    newer = fields.raw("sentence_transformers")
    named = newer.get("activation_fn") if isinstance(newer, dict) else None
    return str(named or fields.raw("sbert_ce_default_activation_function")).endswith("Identity")
