"""``quantization_config`` of config.json -> Quantization: GPTQ, AWQ, FP8, compressed-tensors.

Called by ``models.config``. What a quantiser wrote down about its own work is passed over by name; any other
key that was not read, and may change what the weights mean, is refused by name.
"""

from collections.abc import Callable, Mapping

from quire_server.core.errors import ConfigError
from quire_server.layers.quantized.awq import AWQ
from quire_server.layers.quantized.gptq import GPTQ
from quire_server.layers.quantized.linear import Quantization
from quire_server.layers.quantized.scaled import FP8, Scaled
from quire_server.layers.quantized.skipping import Skipped, checked
from quire_server.models import compressed_tensors_config
from quire_server.models.fields import Fields

GROUP_SIZES = (-1, 32, 64, 128)  # -1: a whole row
# GPTQ, AWQ and FP8 are for the matrices of the blocks; their files need not say that these are left out.
_NEVER = frozenset({"lm_head", "mlp.gate", "block_sparse_moe.gate"})
# How the quantiser worked, with what data, and how its own server is to be tuned.
_HARMLESS = frozenset(
    [
        "act_group_aware", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
        "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize",
        "disable_exllama", "do_fuse", "enable_quanted_input", "exllama_config", "fuse_max_seq_len",
        "gradient_accumulate_steps",
        "iters", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_to_fuse", "mse",
        "nsamples", "provider", "quantizer", "seqlen", "static_groups", "to_quant_block_names", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama",
    ]
)  # fmt: skip


def parse(fields: Fields | None) -> Quantization | None:
    """None: the model is not quantised."""
    if fields is None:
        return None
    quantization = _METHODS[fields.choice("quant_method", tuple(_METHODS), "")](fields)
    fields.refuse_unread(_HARMLESS)
    return quantization


def _gptq(fields: Fields) -> Quantization:
    _four_bits(fields, "bits")
    layout = fields.choice(
        "checkpoint_format", ("gptq", "gptq_v2"), fields.choice("format", ("gptq", "gptq_v2"), "gptq")
    )
    fields.choice("method", ("gptq",), "gptq")
    fields.choice("pack_dtype", ("int32",), "int32")
    fields.choice("data_type", ("int",), "int")
    for key in ("is_marlin_format", "dynamic"):  # another layout; other settings for some layers
        _refuse(fields, key)
    fields.flag("sym")  # the zeros are stored all the same
    weights = GPTQ(_group_size(fields, "group_size"), fields.flag("desc_act"), int(layout == "gptq"))
    skipped = _NEVER - {"lm_head"} if fields.flag("lm_head") else _NEVER
    return Quantization("gptq", weights, Skipped(parts=skipped))


def _awq(fields: Fields) -> Quantization:
    _four_bits(fields, "bits" if fields.raw("bits") is not None else "w_bit")
    size = _group_size(fields, "group_size" if fields.raw("group_size") is not None else "q_group_size")
    fields.choice("version", ("gemm", "GEMM"), "gemm")
    fields.choice("data_type", ("int",), "int")
    for key in ("sym", "zero_point"):  # the zeros are stored all the same
        fields.flag(key)
    return Quantization("awq", AWQ(size), _skipped(fields, "modules_to_not_convert"))


def _fp8(fields: Fields) -> Quantization:
    """AutoFP8's files (one scale a matrix), and those of transformers, which names ``weight_block_size``."""
    fields.choice("fmt", ("e4m3",), "e4m3")
    fields.choice("scale_fmt", ("float",), "float")
    fields.choice("expert_dtype", ("fp8",), "fp8")
    _refuse(fields, "modules_to_convert")
    is_transformers = fields.has("weight_block_size")
    blocks = fields.items("weight_block_size", int, 2)
    if blocks is not None and not all(0 < block <= 1 << 16 for block in blocks):
        fields.complain("weight_block_size", "a list of two sizes")
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
    skipped = _skipped(fields, "ignored_layers", "modules_to_not_convert")
    has_kv_scales = fields.choice("kv_cache_scheme", ("none", "static"), "none") == "static"
    return Quantization("fp8", weights, skipped, has_kv_scales)


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "awq": _awq,
    "compressed-tensors": compressed_tensors_config.parse,
    "fp8": _fp8,
    "gptq": _gptq,
}


def _four_bits(fields: Fields, key: str) -> None:
    if (bits := fields.integer(key, 64)) != 4:
        raise ConfigError(
            f"{fields.where}: {key} {bits} is not supported; supported: 4. Use a 4 bit release of the model."
        )


def _group_size(fields: Fields, key: str) -> int | None:
    size = fields.integer(key, 1 << 20, smallest=-1)
    if size not in GROUP_SIZES:
        raise ConfigError(
            f"{fields.where}: {key} {size} is not supported; supported: {', '.join(map(str, GROUP_SIZES))}. "
            "Use a release of the model with such groups."
        )
    return None if size == -1 else size


def _refuse(fields: Fields, key: str) -> None:
    if value := fields.raw(key):
        raise ConfigError(
            f"{fields.where}: {key} {str(value)[:40]!r} is not supported. Use a release of the model "
            "without it."
        )


def _skipped(fields: Fields, *keys: str) -> Skipped:
    named = [name for key in keys for name in checked(key, fields.strings(key))]
    return Skipped(parts=_NEVER | set(named))
