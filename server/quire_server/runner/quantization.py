"""Which arithmetic the linear layers use: decided once at start, by the settings and what the CPU can do.
Called by ``model_runner``.
"""

from quire_server.core.errors import ConfigError
from quire_server.layers.int8_linear import Int8Linear, has_native_kernels
from quire_server.layers.linear import Linear, LinearFactory

_FACTORIES: dict[str, LinearFactory] = {"none": Linear, "int8": Int8Linear}


def choose(wanted: str, *, dtype_is_auto: bool, dtype: str) -> tuple[str, LinearFactory]:
    """(name, factory). ``auto`` is int8 where nobody named a dtype, the computation is not float32 anyway,
    and the CPU multiplies int8 faster than anything else; who asks for a dtype gets exactly that.
    """
    if wanted == "auto":
        wanted = "int8" if dtype_is_auto and dtype != "float32" and has_native_kernels() else "none"
    if wanted not in _FACTORIES:
        raise ConfigError(f"Quantization {wanted!r} is not supported; supported: auto, none, int8.")
    return wanted, _FACTORIES[wanted]
