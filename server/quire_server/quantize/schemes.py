"""The schemes of ``--scheme``: the ``quantization_config`` of each, in the format of compressed-tensors, and
its algorithm.

How tensors are stored follows from that configuration as this server's own parser reads it, so what is
written is what will be read.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire_server.errors import ConfigError
from quire_server.layers.quantized.format import Rounded
from quire_server.models.config import ModelConfig
from quire_server.quantize import awq, fp8, gptq, int8
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear

_GROUP_SIZES = (128, 64, 32)
_SMALL = 1024  # hidden size up to which four bits cost so much that groups are small


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are stored, and the algorithm that quantises them."""

    layout: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    quantise: Callable[[CalibratedLayer], dict[ObservedLinear, Rounded]]

    @property
    def has_groups(self) -> bool:
        """Whether columns share scales in groups."""
        return bool(self.weights["strategy"] == "group")

    def document(self, config: ModelConfig, group_size: int) -> dict[str, Any]:
        """The value of ``quantization_config``."""
        weights = dict(self.weights) | ({"group_size": group_size} if self.has_groups else {})
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": self.activations and dict(self.activations),
            "output_activations": None,
        }
        routers = [f"re:.*{re.escape(config.names.router)}$"] if config.experts else []
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *routers],
            "kv_cache_scheme": None,
        }


def _weights(kind: str, bits: int, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    return {
        "type": kind, "num_bits": bits, "strategy": strategy, "symmetric": symmetric, "dynamic": False
    }  # fmt: skip


def _by_token(kind: str) -> dict[str, Any]:
    return {"type": kind, "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


_INT4 = _weights("int", 4, "group", symmetric=False)
SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme("float-quantized", _weights("float", 8, "channel"), _by_token("float"), fp8.quantise),
    "int8": Scheme("int-quantized", _weights("int", 8, "channel"), _by_token("int"), int8.quantise),
    "awq": Scheme("pack-quantized", _INT4, None, awq.quantise),
    "gptq": Scheme("pack-quantized", _INT4, None, gptq.quantise),
}


def group_size(hidden_size: int, in_sizes: Iterable[tuple[str, int]]) -> int:
    """The largest group size that divides the inputs of every matrix; 32 if the model is small. Raises
    ConfigError if there is none.
    """
    sizes = dict(in_sizes)
    for size in _GROUP_SIZES[-1:] if hidden_size <= _SMALL else _GROUP_SIZES:
        if not any(in_size % size for in_size in sizes.values()):
            return size
    name, in_size = next((name, size) for name, size in sizes.items() if size % _GROUP_SIZES[-1])
    raise ConfigError(
        f"{name} has {in_size} inputs, which groups of 32 do not divide. Use --scheme int8 or fp8."
    )
