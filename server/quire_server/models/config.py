"""ModelConfig: what the computation needs to know about a model; and the part of config.json that all
families share.

A family's module (such as ``models.llama``) reads its own keys and sets flags; ``models.decoder`` composes
layers from them. No key selects code: ``auto_map`` with its class paths is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_server.core.topology import Range, Topology
from quire_server.errors import ConfigError, ModelCorruptError
from quire_server.layers.quantized.linear import Quantization
from quire_server.models import quantization_config, rope_config
from quire_server.models.config_fields import REMEDY, ConfigFields
from quire_server.models.rope_config import Rope

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between layers."""

    rope: Rope
    window: int | None = None  # a token sees this many positions: itself and those before it
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of the sparse layers. ``owned``: those whose weights this rank has; None: all."""

    count: int
    per_token: int
    intermediate_size: int
    normalises_weights: bool
    owned: Range | None = None

    @property
    def numbers(self) -> range:
        """The numbers of the experts that this rank has."""
        return range(self.count) if self.owned is None else range(*self.owned)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's weights in the checkpoint, below model.layers.N. ``{}`` is the number of the
    expert.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one, fused
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one, fused
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    attention_output_norm: str | None = None  # applied before the output is added to the residual stream
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checked model: sizes, flags, and tensor names. Of one rank of several (``models.sharding``) layers,
    heads and ``intermediate_size`` are the rank's own part, everything else is the whole model's.
    """

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
    has_head_norms: bool = False  # norms of query and key heads, before the rotation
    has_offset_norms: bool = False  # the checkpoint stores w for a weight of 1 + w
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    names: TensorNames = TensorNames()
    quantization: Quantization | None = None
    topology: Topology = Topology()
    first_layer: int = 0  # the number that the first one of ``layers`` has in the checkpoint

    @property
    def num_layers(self) -> int:
        """Attention layers, each with its own cache."""
        return len(self.layers)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head on this rank, padded so that all ranks have equally many."""
        return self.topology.padded_part(self.vocab_size)

    @property
    def has_embedding(self) -> bool:
        """Whether this rank has the embedding: in the first stage, and where the head is the same matrix."""
        topology = self.topology
        return topology.is_first_stage or (topology.is_last_stage and self.tie_word_embeddings)

    @property
    def windows(self) -> frozenset[int | None]:
        """The sliding windows of all layers; None: full attention."""
        return frozenset(layer.window for layer in self.layers)


def common(
    fields: ConfigFields,
    *,
    head_size: int | None = None,
    eps: float = 1e-6,
    rope_keys: rope_config.RopeKeys = rope_config.DEFAULT_KEYS,
    ties: bool = False,
    activation: str = "silu",
) -> ModelConfig:
    """What all families share. The arguments are transformers' defaults for keys that a family's file may
    omit.
    """
    hidden, heads = fields.integer("hidden_size", 1 << 17), fields.integer("num_attention_heads", 1 << 12)
    kv_heads = fields.integer("num_key_value_heads", 1 << 12, heads)
    head_size = fields.integer("head_dim", 1 << 12, head_size or hidden // heads)
    if heads % kv_heads or head_size % 2 or head_size == 0:
        raise ModelCorruptError(
            f"config.json: {heads} heads of size {head_size} cannot share {kv_heads} kv heads. {REMEDY}"
        )
    for key in ("hidden_act", "hidden_activation"):
        fields.choice(key, (activation,), activation)
    max_position = fields.integer("max_position_embeddings", rope_config.MAX_POSITION)
    rope = rope_config.parse(fields, head_size, max_position, rope_keys)
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
        quantization=quantization_config.parse(fields.inner("quantization_config")),
    )


def with_windows(config: ModelConfig, windows: Sequence[int | None]) -> ModelConfig:
    """The same configuration with a sliding window (or None) per layer."""
    layers = zip(config.layers, windows, strict=True)
    return replace(config, layers=tuple(replace(layer, window=window) for layer, window in layers))


def _dtype(fields: ConfigFields) -> str:
    value = fields.raw("dtype") or fields.raw("torch_dtype") or "float32"
    if value not in _DTYPES:
        raise ConfigError(
            f"config.json: dtype {str(value)[:40]!r} is not supported; supported: {', '.join(_DTYPES)}."
        )
    return str(value)
