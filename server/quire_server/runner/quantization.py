"""Which arithmetic the linear layers use: decided once at start, by the settings and what the CPU can do.
Called by ``model_runner``.
"""

from quire_server.core.errors import ConfigError
from quire_server.layers.gpu_linear import GpuLinear
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.layers.linear import Linear, LinearFactory
from quire_server.layers.quantized.linear import Quantization

FIRST_WITH_FP8 = 89
_FACTORIES: dict[str, LinearFactory] = {"none": Linear, "int8": Int8Linear}


def choose(
    wanted: str,
    *,
    checkpoint: Quantization | None,
    dtype_is_auto: bool,
    dtype: str,
    capability: int | None = None,
) -> tuple[str, LinearFactory]:
    """(name, factory). ``auto`` is int8 where nobody named a dtype, the computation is not float32 anyway,
    and the CPU multiplies int8 faster than anything else; who asks for a dtype gets exactly that. A quantised
    checkpoint brings its own method, and is not rounded twice: int8 for it is what is int8 already. A GPU
    (of a compute ``capability``) computes in the checkpoint's method, where it has kernels for it, or dense;
    float8 weights are refused where the hardware has no float8.
    """
    if capability is not None:
        return _of_gpu(checkpoint, capability), GpuLinear
    is_faster = dtype_is_auto and dtype != "float32" and has_native_kernels()
    if checkpoint is not None:
        return _of_checkpoint(wanted, checkpoint, is_faster)
    if wanted == "auto":
        wanted = "int8" if is_faster else "none"
    if wanted not in _FACTORIES:
        raise ConfigError(f"Quantization {wanted!r} is not supported; supported: auto, none, int8.")
    return wanted, _FACTORIES[wanted]


def _of_gpu(checkpoint: Quantization | None, capability: int) -> str:
    if checkpoint is None:
        return "none"
    if checkpoint.is_fp8 and capability < FIRST_WITH_FP8:
        raise ConfigError(
            f"The model's weights are FP8 ({checkpoint.method}), and a GPU of compute capability "
            f"{capability // 10}.{capability % 10} has no FP8: take one of 8.9 or more (L4, L40S, H100, "
            "H200), or serve the model unquantised, in int8 or in 4 bits (AWQ, GPTQ)."
        )
    return checkpoint.method


def _of_checkpoint(wanted: str, checkpoint: Quantization, is_faster: bool) -> tuple[str, LinearFactory]:
    if checkpoint.is_w8a8 and (wanted == "int8" or (wanted == "auto" and is_faster)):
        return f"{checkpoint.method}, int8", Int8Linear
    if wanted not in ("auto", "none"):
        raise ConfigError(
            f"The model is quantised already ({checkpoint.method}): drop --quantization {wanted}, "
            "or serve the checkpoint that it was made from."
        )
    return checkpoint.method, Linear
