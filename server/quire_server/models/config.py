"""ModelConfig: what the arithmetic needs to know of a model, and the part of config.json that all families
share.

A family file (``models.llama`` and its neighbours) reads what is its own and sets the flags;
``models.decoder`` composes layers from them. Nothing in the file selects code: ``auto_map`` with its class
paths is never looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_server.core.errors import ConfigError, ModelCorruptError
from quire_server.models import rope_config
from quire_server.models.fields import REMEDY, Fields
from quire_server.models.rope_config import Rope

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """In what one layer may differ from the next."""

    rope: Rope
    window: int | None = None  # a token sees itself and so many less one before it
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The sparse layers' experts."""

    count: int
    per_token: int
    intermediate_size: int
    normalises_weights: bool


@dataclass(frozen=True, slots=True)
class Names:
    """Where a checkpoint keeps the weights of a layer, below model.layers.N. ``{}`` is the number of the
    expert.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one, fused
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one, fused
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    attention_output_norm: str | None = None  # before the output joins the residual stream
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checked model: sizes, flags, and the names in its checkpoint."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    activation: str = "silu"  # or gelu_tanh
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = False  # of queries and keys, before the rotation
    has_offset_norms: bool = False  # the checkpoint says w and means 1 + w
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    names: Names = Names()

    @property
    def num_layers(self) -> int:
        """Attention layers, each with a cache of its own."""
        return len(self.layers)

    @property
    def windows(self) -> frozenset[int | None]:
        """All sliding windows; None among them: some layers see everything."""
        return frozenset(layer.window for layer in self.layers)


def common(
    fields: Fields,
    *,
    head_size: int | None = None,
    eps: float = 1e-6,
    rope_wording: rope_config.Wording = rope_config.USUAL,
    ties: bool = False,
    activation: str = "silu",
) -> ModelConfig:
    """What all families share. The arguments are transformers' defaults for what a family's file may leave
    out.
    """
    hidden, heads = fields.integer("hidden_size", 1 << 17), fields.integer("num_attention_heads", 1 << 12)
    kv_heads = fields.integer("num_key_value_heads", 1 << 12, heads)
    head_size = fields.integer("head_dim", 1 << 12, head_size or hidden // heads)
    if heads % kv_heads or head_size % 2 or head_size == 0:
        raise ModelCorruptError(
            f"config.json: {heads} heads of size {head_size} cannot share {kv_heads} kv heads. {REMEDY}"
        )
    if fields.raw("quantization_config") is not None:
        raise ConfigError(
            "The model is quantised; this server serves float checkpoints. Use the original model."
        )
    for key in ("hidden_act", "hidden_activation"):
        fields.choice(key, (activation,), activation)
    max_position = fields.integer("max_position_embeddings", rope_config.MAX_POSITION)
    rope = rope_config.parse(fields, head_size, max_position, rope_wording)
    return ModelConfig(
        architecture=fields.raw("architectures")[0],
        vocab_size=fields.integer("vocab_size", 1 << 22),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position=rope.longest or max_position,
        norm_eps=fields.number("rms_norm_eps", eps, largest=1.0),
        layers=(LayerConfig(rope),) * fields.integer("num_hidden_layers", 1 << 10),
        attention_scale=head_size**-0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", ties),
        dtype=_dtype(fields),
    )


def with_windows(config: ModelConfig, windows: Sequence[int | None]) -> ModelConfig:
    """The same, with a sliding window (or None) for each layer."""
    layers = zip(config.layers, windows, strict=True)
    return replace(config, layers=tuple(replace(layer, window=window) for layer, window in layers))


def _dtype(fields: Fields) -> str:
    value = fields.raw("dtype") or fields.raw("torch_dtype") or "float32"
    if value not in _DTYPES:
        raise ConfigError(
            f"config.json: dtype {str(value)[:40]!r} is not supported; supported: {', '.join(_DTYPES)}."
        )
    return str(value)
