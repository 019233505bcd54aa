"""Chooses the arithmetic of the linear layers, once at start, by the settings and the hardware."""

from quire_server.errors import ConfigError
from quire_server.layers.int4_linear import make_int4_linear
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.layers.linear import GpuLinear, Linear, LinearFactory
from quire_server.layers.quantized.linear import Quantization

FIRST_WITH_FP8 = 89
_FACTORIES: dict[str, LinearFactory] = {"none": Linear, "int8": Int8Linear, "int4": make_int4_linear}


def choose(
    wanted: str,
    *,
    checkpoint: Quantization | None,
    dtype_is_auto: bool,
    stored: str,
    capability: int | None = None,
) -> tuple[str, LinearFactory]:
    """(name, factory of linear layers).

    * ``auto`` without a quantised checkpoint is int8 if no dtype was named, the model is not stored in
      float32 (``stored``: its dtype) and the CPU has int8 kernels, which are faster than anything else there.
      A dtype that was named is used exactly.
    * A quantised checkpoint keeps its own method and is not rounded a second time; int8 or int4 applies to it
      only if its weights are that already. int4 is nothing that ``auto`` chooses.
    * On a GPU (``capability``: its compute capability) the checkpoint's method is used where there are
      kernels for it, and dense layers otherwise. FP8 weights are refused on hardware without FP8.
    """
    if capability is not None:
        return _of_gpu(checkpoint, capability), GpuLinear
    is_faster = dtype_is_auto and stored != "float32" and has_native_kernels()
    if checkpoint is not None:
        return _of_checkpoint(wanted, checkpoint, is_faster)
    if wanted == "auto":
        wanted = "int8" if is_faster else "none"
    if wanted not in _FACTORIES:
        raise ConfigError(f"Quantization {wanted!r} is not supported; supported: auto, none, int8, int4.")
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
    if checkpoint.is_int4 and wanted == "int4":
        return f"{checkpoint.method}, int4", make_int4_linear
    if wanted not in ("auto", "none"):
        takes = " int4 takes 4 bits in groups of a multiple of 32 or whole rows, without desc_act."
        raise ConfigError(
            f"The model is quantised already ({checkpoint.method}): drop --quantization {wanted}, "
            f"or serve the checkpoint that it was made from.{takes if wanted == 'int4' else ''}"
        )
    return checkpoint.method, Linear
