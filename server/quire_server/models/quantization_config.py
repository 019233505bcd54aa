"""Parses ``quantization_config`` of config.json: GPTQ, AWQ, FP8 and compressed-tensors.

Keys that record how the quantiser worked are ignored by name. Any other key that was not read may change the
meaning of the weights and is refused by name. compressed-tensors files must have one group of settings for
all linear layers.
"""

from collections.abc import Callable, Mapping

from quire_server.errors import ConfigError
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.format import WeightFormat
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.ignored_layers import IgnoredLayers, checked, compiled
from quire_server.layers.quantized.linear import Quantization
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.scaled_8bit import FP8, INT8, Scaled
from quire_server.models.config_fields import ConfigFields

GROUP_SIZES = (-1, 32, 64, 128)  # -1: a whole row
# GPTQ, AWQ and FP8 quantise only the matrices of the blocks; their files need not list these as ignored.
_NEVER_QUANTIZED = frozenset({"lm_head", "mlp.gate", "block_sparse_moe.gate"})
# Records of the quantiser's settings and data, and tuning of its own inference engine.
_HARMLESS = frozenset(
    [
        "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
        "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize",
        "disable_exllama", "do_fuse", "enable_quanted_input", "exllama_config", "fuse_max_seq_len",
        "gradient_accumulate_steps",
        "iters", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_to_fuse", "mse",
        "nsamples", "provider", "quantizer", "seqlen", "static_groups", "to_quant_block_names", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama",
    ]
)  # fmt: skip
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_REGEX = "re:"
_MAX_GROUP = 1 << 16


def parse(fields: ConfigFields | None) -> Quantization | None:
    """None: the model is not quantised."""
    if fields is None:
        return None
    quantization = _METHODS[fields.choice("quant_method", tuple(_METHODS), "")](fields)
    fields.refuse_unread(_HARMLESS)
    return quantization


def _gptq(fields: ConfigFields) -> Quantization:
    _require_four_bits(fields, "bits")
    layout = fields.choice(
        "checkpoint_format", ("gptq", "gptq_v2"), fields.choice("format", ("gptq", "gptq_v2"), "gptq")
    )
    fields.choice("method", ("gptq",), "gptq")
    fields.choice("pack_dtype", ("int32",), "int32")
    fields.choice("data_type", ("int",), "int")
    for key in ("is_marlin_format", "dynamic"):  # another layout; other settings for some layers
        _refuse(fields, key)
    fields.flag("sym")  # zeros are stored in either case
    weights = GPTQ(_group_size(fields, "group_size"), fields.flag("desc_act"), int(layout == "gptq"))
    ignored = _NEVER_QUANTIZED - {"lm_head"} if fields.flag("lm_head") else _NEVER_QUANTIZED
    return Quantization("gptq", weights, IgnoredLayers(parts=ignored))


def _awq(fields: ConfigFields) -> Quantization:
    _require_four_bits(fields, "bits" if fields.raw("bits") is not None else "w_bit")
    size = _group_size(fields, "group_size" if fields.raw("group_size") is not None else "q_group_size")
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    fields.choice("data_type", ("int",), "int")
    for key in ("sym", "zero_point"):  # zeros are stored in either case
        fields.flag(key)
    return Quantization("awq", AWQ(size), _ignored_layers(fields, "modules_to_not_convert"))


def _fp8(fields: ConfigFields) -> Quantization:
    """Files of AutoFP8 (one scale per matrix) and of transformers, which has the key
    ``weight_block_size``.
    """
    fields.choice("fmt", ("e4m3",), "e4m3")
    fields.choice("scale_fmt", ("float",), "float")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    _refuse(fields, "modules_to_convert")
    is_transformers = fields.has("weight_block_size")
    blocks = fields.items("weight_block_size", int, 2)
    if blocks is not None and not all(0 < block <= 1 << 16 for block in blocks):
        fields.raise_invalid("weight_block_size", "a list of two sizes")
    activations: tuple[str, ...] = ()
    if fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
        activations = ("activation_scale",) if is_transformers else ("input_scale",)
    weights = Scaled(
        FP8,
        (blocks[0], blocks[1]) if blocks else (None, None),
        "weight_scale_inv" if is_transformers else "weight_scale",
        activations,
        rounds_inputs_to_fp8=True,
    )
    ignored = _ignored_layers(fields, "ignored_layers", "modules_to_not_convert")
    has_kv_scales = fields.choice("kv_cache_scheme", ("none", "static"), "none") == "static"
    return Quantization("fp8", weights, ignored, has_kv_scales)


def _compressed_tensors(fields: ConfigFields) -> Quantization:
    """The scheme of the only group, and the ignored layers."""
    _require_empty(fields, "moe_sparsity_config", "sparsity_config", "transform_config")
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
        groups.raise_invalid(names[0], "an object")
    layout = group.choice("format", _FORMATS, layout)
    if (targets := group.strings("targets")) != ["Linear"]:
        raise ConfigError(
            f"{group.where}: targets {str(targets)[:60]} is not supported; supported: ['Linear'], with "
            "'ignore'. Quantise the model again."
        )
    _require_empty(group, "output_activations")
    weights = _weights(group, layout)
    group.refuse_unread()
    ignored = checked("ignore", fields.strings("ignore"))
    return Quantization(
        "compressed-tensors",
        weights,
        IgnoredLayers(
            names=frozenset(name for name in ignored if not name.startswith(_REGEX)),
            patterns=tuple(
                compiled("ignore", name.removeprefix(_REGEX)) for name in ignored if name.startswith(_REGEX)
            ),
        ),
        has_kv_scales=_has_kv_scales(fields),
    )


def _weights(group: ConfigFields, layout: str) -> WeightFormat:
    weights = group.inner("weights")
    if weights is None:
        group.raise_invalid("weights", "an object")
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
    weights.choice("actorder", ("static", "weight"), "weight")  # affects only how the quantiser worked
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    scale = _SCALE_SHAPES[strategy](weights)
    _read_past(weights)
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


def _group_scale(weights: ConfigFields) -> tuple[int | None, int | None]:
    return 1, weights.integer("group_size", _MAX_GROUP)


def _block_scale(weights: ConfigFields) -> tuple[int | None, int | None]:
    sizes = weights.items("block_structure", int, 2)
    if sizes is None or not all(0 < size <= _MAX_GROUP for size in sizes):
        weights.raise_invalid("block_structure", "a list of two sizes")
    return sizes[0], sizes[1]


_SCALE_SHAPES = {
    "tensor": lambda weights: (None, None),
    "channel": lambda weights: (1, None),
    "group": _group_scale,
    "block": _block_scale,
}


def _activations(group: ConfigFields) -> tuple[tuple[str, ...], bool, bool]:
    """(suffixes of stored activation scales, whether inputs are quantised to int8 per row, whether to FP8).

    For FP8 inputs a scale per row is at least as accurate as the stored one.
    """
    inputs = group.inner("input_activations")
    if inputs is None:
        return (), False, False
    kind = inputs.choice("type", ("float", "int"), "int")
    bits = inputs.integer("num_bits", 64)
    strategy = inputs.choice("strategy", ("tensor", "token", "group"), "tensor")
    is_symmetric, is_dynamic = inputs.flag("symmetric", True), inputs.flag("dynamic")
    _read_past(inputs)
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


def _has_kv_scales(fields: ConfigFields) -> bool:
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
    _read_past(scheme)
    if not is_right:
        raise ConfigError(
            f"{scheme.where}: only 8 bit float, by tensor, symmetric and static is supported. Use a release "
            "of the model with such a scheme, or without one."
        )
    return True


def _read_past(arguments: ConfigFields) -> None:
    """Read and ignore how scales were computed, and sizes that the strategy does not use."""
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size", "block_structure"):
        arguments.raw(key)
    arguments.refuse_unread()


def _require_empty(fields: ConfigFields, *keys: str) -> None:
    for key in keys:
        value = fields.raw(key)
        if value and value != {"format": "dense"}:
            raise ConfigError(
                f"{fields.where}: {key} {str(value)[:40]!r} is not supported. Use a release of the model "
                "without it."
            )


_METHODS: Mapping[str, Callable[[ConfigFields], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
}


def _require_four_bits(fields: ConfigFields, key: str) -> None:
    if (bits := fields.integer(key, 64)) != 4:
        raise ConfigError(
            f"{fields.where}: {key} {bits} is not supported; supported: 4. Use a 4 bit release of the model."
        )


def _group_size(fields: ConfigFields, key: str) -> int | None:
    size = fields.integer(key, 1 << 20, smallest=-1)
    if size not in GROUP_SIZES:
        raise ConfigError(
            f"{fields.where}: {key} {size} is not supported; supported: {', '.join(map(str, GROUP_SIZES))}. "
            "Use a release of the model with such groups."
        )
    return None if size == -1 else size


def _refuse(fields: ConfigFields, key: str) -> None:
    if value := fields.raw(key):
        raise ConfigError(
            f"{fields.where}: {key} {str(value)[:40]!r} is not supported. Use a release of the model "
            "without it."
        )


def _ignored_layers(fields: ConfigFields, *keys: str) -> IgnoredLayers:
    named = [name for key in keys for name in checked(key, fields.strings(key))]
    return IgnoredLayers(parts=_NEVER_QUANTIZED | set(named))
