"""Whether a GPU computes with the weights of a checkpoint as they are stored, from ``quantization_config`` of
its config.json.

The server dequantises formats that none of its kernels multiplies, and then holds 16 bits of each weight.
Knows no sizes of matrices: those that no kernel fits are rare, and the server's log names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FOUR_BITS, _GROUPS = 4, 32  # sizes of groups are multiples of it
_ROWS, _WHOLE = "channel", "tensor"  # what shares a scale


def is_dequantized(config: Mapping[str, Any]) -> bool:
    """Of a whole config.json, which may hold anything."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return False
    match stored.get("quant_method"):
        case "fp8":
            return bool(stored.get("weight_block_size"))
        case "compressed-tensors":
            return _is_dequantized(stored)
        case "awq" | "gptq":
            size = stored.get("group_size", stored.get("q_group_size", -1))
            return isinstance(size, int) and size > 0 and size % _GROUPS != 0
        case _:
            return False


def _is_dequantized(stored: Mapping[str, Any]) -> bool:
    """Of compressed-tensors, by its first group of settings."""
    groups = stored.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    if not isinstance(group, Mapping):
        return False
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return False
    strategy, bits = weights.get("strategy") or _WHOLE, weights.get("num_bits")
    if (group.get("format") or stored.get("format")) == "pack-quantized":
        size = weights.get("group_size") if strategy == "group" else None
        return bits != _FOUR_BITS or (isinstance(size, int) and size % _GROUPS != 0)
    if not isinstance(inputs, Mapping) or inputs.get("symmetric", True) is not True:
        return True
    kind, of_inputs = weights.get("type") or "int", inputs.get("type") or "int"
    by = inputs.get("strategy") or _WHOLE
    if kind == "float":
        return of_inputs != "float" or strategy not in (_WHOLE, _ROWS) or by not in (_WHOLE, "token")
    is_by_row = strategy == _ROWS and weights.get("symmetric", True) is True
    takes_inputs = of_inputs == "int" and by == "token" and inputs.get("dynamic") is True
    return not (is_by_row and takes_inputs)
