"""Which arithmetic the linear layers use: decided once at start, by the settings and what the CPU can do.
Called by ``model_runner``.
"""

from quire_server.core.errors import ConfigError
from quire_server.layers.gpu_linear import GpuLinear
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.layers.linear import Linear, LinearFactory
from quire_server.layers.quantized.linear import Quantization

_FACTORIES: dict[str, LinearFactory] = {"none": Linear, "int8": Int8Linear}


def choose(
    wanted: str, *, checkpoint: Quantization | None, dtype_is_auto: bool, dtype: str, for_gpu: bool = False
) -> tuple[str, LinearFactory]:
    """(name, factory). ``auto`` is int8 where nobody named a dtype, the computation is not float32 anyway,
    and the CPU multiplies int8 faster than anything else; who asks for a dtype gets exactly that. A quantised
    checkpoint brings its own method, and is not rounded twice: int8 for it is what is int8 already. A GPU
    computes in the checkpoint's method, where it has kernels for it, or dense.
    """
    if for_gpu:
        return (checkpoint.method if checkpoint is not None else "none"), GpuLinear
    is_faster = dtype_is_auto and dtype != "float32" and has_native_kernels()
    if checkpoint is not None:
        return _of_checkpoint(wanted, checkpoint, is_faster)
    if wanted == "auto":
        wanted = "int8" if is_faster else "none"
    if wanted not in _FACTORIES:
        raise ConfigError(f"Quantization {wanted!r} is not supported; supported: auto, none, int8.")
    return wanted, _FACTORIES[wanted]


def _of_checkpoint(wanted: str, checkpoint: Quantization, is_faster: bool) -> tuple[str, LinearFactory]:
    if checkpoint.is_w8a8 and (wanted == "int8" or (wanted == "auto" and is_faster)):
        return f"{checkpoint.method}, int8", Int8Linear
    if wanted not in ("auto", "none"):
        raise ConfigError(
            f"The model is quantised already ({checkpoint.method}): drop --quantization {wanted}, "
            "or serve the checkpoint that it was made from."
        )
    return checkpoint.method, Linear
