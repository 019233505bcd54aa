"""``quantization_config`` in the words of compressed-tensors. Called by ``models.quantization_config``.

One group of settings for all linear layers; files that mix several are refused.
"""

from quire_server.core.errors import ConfigError
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.linear import Quantization
from quire_server.layers.quantized.packed import Packed
from quire_server.layers.quantized.scaled import FP8, INT8, Scaled
from quire_server.layers.quantized.skipping import Skipped, checked, compiled
from quire_server.models.fields import Fields

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_REGEX = "re:"
_MAX_GROUP = 1 << 16


def parse(fields: Fields) -> Quantization:
    """The scheme of the only group, and which layers are left out of it."""
    _empty(fields, "moe_sparsity_config", "sparsity_config", "transform_config")
    fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
    for key in ("global_compression_ratio", "version"):
        fields.raw(key)
    layout = fields.choice("format", _FORMATS, "")
    groups = fields.inner("config_groups")
    names = groups.keys() if groups is not None else []
    if groups is None or len(names) != 1:
        raise ConfigError(
            f"{fields.where}: config_groups has {len(names)} groups; supported: one for all layers. Use a "
            "release of the model that is quantised in one way."
        )
    group = groups.inner(names[0])
    if group is None:
        groups.complain(names[0], "an object")
    layout = group.choice("format", _FORMATS, layout)
    if (targets := group.strings("targets")) != ["Linear"]:
        raise ConfigError(
            f"{group.where}: targets {str(targets)[:60]} is not supported; supported: ['Linear'], with "
            "'ignore'. Quantise the model again."
        )
    _empty(group, "output_activations")
    weights = _weights(group, layout)
    group.refuse_unread()
    ignored = checked("ignore", fields.strings("ignore"))
    return Quantization(
        "compressed-tensors",
        weights,
        Skipped(
            names=frozenset(name for name in ignored if not name.startswith(_REGEX)),
            patterns=tuple(
                compiled("ignore", name.removeprefix(_REGEX)) for name in ignored if name.startswith(_REGEX)
            ),
        ),
        has_kv_scales=_has_kv_scales(fields),
    )


def _weights(group: Fields, layout: str) -> WeightFormat:
    weights = group.inner("weights")
    if weights is None:
        group.complain("weights", "an object")
    kind = weights.choice("type", ("float", "int"), "int")
    bits = weights.integer("num_bits", 64)
    is_packed = layout == "pack-quantized"
    if bits not in ((4, 8) if is_packed else (8,)) or (is_packed and kind == "float"):
        raise ConfigError(
            f"{weights.where}: num_bits {bits} of type {kind} in format {layout} is not supported; "
            "supported: 8, and 4 of type int in format pack-quantized. Use such a release of the model."
        )
    if {"float-quantized": "float", "int-quantized": "int"}.get(layout, kind) != kind:
        raise ConfigError(
            f"{weights.where}: type {kind} contradicts format {layout}. Quantise the model again."
        )
    has_zeros = not weights.flag("symmetric", True)
    if (has_zeros and kind == "float") or weights.flag("dynamic"):
        raise ConfigError(
            f"{weights.where}: only weights that are static, and symmetric if they are float, are supported. "
            "Use a release of the model with such weights."
        )
    weights.choice("actorder", ("static", "weight"), "weight")  # a matter of the quantiser alone
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    scale = _SCALE_SHAPES[strategy](weights)
    _pass_over(weights)
    activations, rounds_inputs, rounds_to_fp8 = _activations(group)
    if is_packed:
        if strategy not in ("channel", "group") or activations:
            raise ConfigError(
                f"{group.where}: strategy {strategy} with static activations {bool(activations)} is not "
                "supported in format pack-quantized; supported: channel and group, without. Use such a model."
            )
        return Packed(bits, scale[1], has_zeros)
    dtype = FP8 if kind == "float" else INT8
    return Scaled(dtype, scale, "weight_scale", activations, has_zeros, rounds_inputs, rounds_to_fp8)


def _group_scale(weights: Fields) -> tuple[int | None, int | None]:
    return 1, weights.integer("group_size", _MAX_GROUP)


def _block_scale(weights: Fields) -> tuple[int | None, int | None]:
    sizes = weights.items("block_structure", int, 2)
    if sizes is None or not all(0 < size <= _MAX_GROUP for size in sizes):
        weights.complain("block_structure", "a list of two sizes")
    return sizes[0], sizes[1]


_SCALE_SHAPES = {
    "tensor": lambda weights: (None, None),
    "channel": lambda weights: (1, None),
    "group": _group_scale,
    "block": _block_scale,
}


def _activations(group: Fields) -> tuple[tuple[str, ...], bool, bool]:
    """What the checkpoint holds for activations that are quantised with fixed scales; whether it asks for
    int8 ones, each row by itself; and whether for float8 ones, which each row's own scale serves at least as
    well as a fixed one.
    """
    inputs = group.inner("input_activations")
    if inputs is None:
        return (), False, False
    kind = inputs.choice("type", ("float", "int"), "int")
    bits = inputs.integer("num_bits", 64)
    strategy = inputs.choice("strategy", ("tensor", "token", "group"), "tensor")
    is_symmetric, is_dynamic = inputs.flag("symmetric", True), inputs.flag("dynamic")
    _pass_over(inputs)
    is_fp8 = (kind, bits, is_symmetric) == ("float", 8, True)
    if is_dynamic:
        is_int8 = (kind, bits, strategy, is_symmetric) == ("int", 8, "token", True)
        return (), is_int8, is_fp8 and strategy in ("token", "tensor")
    if strategy != "tensor" or not is_symmetric:
        raise ConfigError(
            f"{inputs.where}: static activations by {strategy}, symmetric {is_symmetric}, are not supported; "
            "supported: symmetric, by tensor."
        )
    return ("input_scale",), False, is_fp8


def _has_kv_scales(fields: Fields) -> bool:
    scheme = fields.inner("kv_cache_scheme")
    if scheme is None:
        return False
    is_right = (
        scheme.choice("type", ("float",), "int") == "float"
        and scheme.integer("num_bits", 64) == 8
        and scheme.choice("strategy", ("tensor",), "tensor") == "tensor"
        and scheme.flag("symmetric", True)
        and not scheme.flag("dynamic")
    )
    _pass_over(scheme)
    if not is_right:
        raise ConfigError(
            f"{scheme.where}: only 8 bit float, by tensor, symmetric and static is supported. Use a release "
            "of the model with such a scheme, or without one."
        )
    return True


def _pass_over(arguments: Fields) -> None:
    """How scales were found, and sizes that the strategy makes no use of."""
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "block_structure"):
        arguments.raw(key)
    arguments.refuse_unread()


def _empty(fields: Fields, *keys: str) -> None:
    for key in keys:
        value = fields.raw(key)
        if value and value != {"format": "dense"}:
            raise ConfigError(
                f"{fields.where}: {key} {str(value)[:40]!r} is not supported. Use a release of the model "
                "without it."
            )
