"""Parses the rotary embedding settings of config.json, with the older keys (rope_theta, rope_scaling) and the
newer one (rope_parameters). ``models.rope`` computes them.
"""

import math
from dataclasses import dataclass

from quire_server.errors import ModelCorruptError
from quire_server.models.config_fields import REMEDY, ConfigFields

MAX_POSITION = 1 << 24
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies of one kind of layer. Layers with equal settings share tables."""

    size: int  # number of rotated dimensions, the leading ones of a head
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0  # yarn
    beta_slow: float = 0.0
    truncates: bool = True
    divisors: tuple[float, ...] = ()  # longrope: one per frequency
    amplitude: float = 1.0  # factor of cos and sin

    @property
    def longest(self) -> int | None:
        """The longest context that the scaling supports, if that is not max_position_embeddings."""
        if self.kind == "longrope":  # beyond it other divisors apply, to earlier tokens too
            return self.original_max_position
        if self.kind == "yarn":
            return min(int(self.original_max_position * self.factor), MAX_POSITION)
        return None


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """How a family's config.json describes the rotation.

    ``theta``: the default. ``layer_type``: rope_parameters has one object per type of layer, and rope_scaling
    applies to full attention. ``may_be_partial``: partial_rotary_factor is supported.
    """

    theta: float = 10000.0
    theta_key: str = "rope_theta"
    layer_type: str | None = None
    may_be_partial: bool = False


DEFAULT_KEYS = RopeKeys()


def parse(fields: ConfigFields, head_size: int, max_position: int, keys: RopeKeys = DEFAULT_KEYS) -> Rope:
    """From the top level of config.json."""
    inner = fields.inner("rope_parameters")
    if inner is None and keys.layer_type != "sliding_attention":
        inner = fields.inner("rope_scaling")
    elif inner is not None and keys.layer_type is not None:
        both, inner = inner, inner.inner(keys.layer_type)
        both.refuse_unread(harmless=("full_attention", "sliding_attention"))
    inner = inner or ConfigFields({})
    size = head_size
    if keys.may_be_partial:
        outside = fields.number("partial_rotary_factor", 1.0, largest=1.0)
        size = int(head_size * inner.number("partial_rotary_factor", outside, largest=1.0))
    original = fields.optional_integer("original_max_position_embeddings", MAX_POSITION)
    theta = fields.number(keys.theta_key, keys.theta)
    return parse_inner(inner, size, max_position, theta=theta, original=original)


def parse_inner(
    inner: ConfigFields, size: int, max_position: int, *, theta: float, original: int | None = None
) -> Rope:
    """From the object with rope_type. ``original`` from outside takes precedence, as in transformers."""
    old_kind = inner.choice("type", (*KINDS, "su"), "default")
    kind = inner.choice("rope_type", KINDS, "longrope" if old_kind == "su" else old_kind)
    theta = inner.number("rope_theta", theta)
    if theta <= 1:
        inner.raise_invalid("rope_theta", "a number above 1")
    if size < 2 or size % 2:
        raise ModelCorruptError(f"config.json: {size} rotary dimensions cannot be paired. {REMEDY}")
    inside = inner.integer("original_max_position_embeddings", MAX_POSITION, max_position)
    original = original or inside
    if kind == "longrope" and original < 2:
        inner.raise_invalid("original_max_position_embeddings", "a number above 1")
    settings = _Settings(inner, size, theta, original, max_position)
    rope = settings.read(kind)
    inner.refuse_unread()
    return rope


@dataclass(frozen=True, slots=True)
class _Settings:
    inner: ConfigFields
    size: int
    theta: float
    original: int
    max_position: int

    def read(self, kind: str) -> Rope:
        match kind:
            case "linear":
                return Rope(self.size, self.theta, kind, self.inner.number("factor"))
            case "llama3":
                return self._llama3()
            case "yarn":
                return self._yarn()
            case "longrope":
                return self._longrope()
        return Rope(self.size, self.theta)

    def _llama3(self) -> Rope:
        low, high = self.inner.number("low_freq_factor"), self.inner.number("high_freq_factor")
        if low >= high:
            raise ModelCorruptError(f"config.json: low_freq_factor must be below high_freq_factor. {REMEDY}")
        return Rope(
            self.size,
            self.theta,
            "llama3",
            self.inner.number("factor"),
            self.original,
            low_freq_factor=low,
            high_freq_factor=high,
        )

    def _yarn(self) -> Rope:
        """arXiv:2309.00071; mscale and mscale_all_dim are DeepSeek's and are used only together."""
        factor = self.inner.number("factor", self.max_position / self.original)
        mscale, all_dim = self.inner.optional_number("mscale"), self.inner.optional_number("mscale_all_dim")
        amplitude = _yarn_amplitude(factor, 1.0)
        if mscale and all_dim:
            amplitude = _yarn_amplitude(factor, mscale) / _yarn_amplitude(factor, all_dim)
        return Rope(
            self.size,
            self.theta,
            "yarn",
            factor,
            self.original,
            beta_fast=self.inner.number("beta_fast", 32.0),
            beta_slow=self.inner.number("beta_slow", 1.0),
            truncates=self.inner.flag("truncate", True),
            amplitude=self.inner.number("attention_factor", amplitude),
        )

    def _longrope(self) -> Rope:
        """arXiv:2402.13753. Only the short factors are used: the context ends where the long ones would
        apply.
        """
        short, long = (
            self.inner.items(f"{which}_factor", float, self.size // 2) for which in ("short", "long")
        )
        if short is None or long is None:
            raise ModelCorruptError(f"config.json: longrope has no short_factor and long_factor. {REMEDY}")
        factor = self.inner.number("factor", self.max_position / self.original)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(self.original)) if factor > 1 else 1.0
        return Rope(
            self.size,
            self.theta,
            "longrope",
            factor,
            self.original,
            divisors=tuple(float(item) for item in short),
            amplitude=self.inner.number("attention_factor", amplitude),
        )


def _yarn_amplitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
