"""int8 matrices of a checkpoint, multiplied without dequantising, by the kernels of ``Int8Linear``: one scale
per output, and one per 64 numbers of an input row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import Int8Weight, int8_linear, pack_int8
from quire_server.layers.int8_linear import tensors_of
from quire_server.layers.linear import LinearShape
from quire_server.layers.quantized.format import refuse_not_finite


class StoredInt8:
    """A LinearLayer whose parts are all stored as int8."""

    forward_fp8 = None
    _packed: Int8Weight | None = None

    def __init__(self, shape: LinearShape) -> None:
        self._shape, out_size, device = shape, sum(shape.out_sizes), shape.device
        self._weight = torch.empty(out_size, shape.in_size, dtype=torch.int8, device=device)
        self._scales = torch.empty(out_size, 1, device=device)
        self._bias = torch.empty(out_size, device=device) if shape.bias else None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "finish() comes before the first call"
        return int8_linear(x, self._packed, self._bias)

    def targets(self) -> dict[str, Tensor]:
        """The tensors in the checkpoint's own shapes and types."""
        parts = {"weight": self._weight, "weight_scale": self._scales}
        if self._bias is not None:
            parts["bias"] = self._bias
        return self._shape.by_prefix(parts)

    def weights(self) -> Sequence[Tensor]:
        """The packed tensors, once they exist."""
        weight = self._packed or Int8Weight(self._weight, self._scales, is_native=False)
        return tensors_of(weight, self._bias)

    def finish(self) -> None:
        """Pack, and free the plain matrix."""
        refuse_not_finite(f"{self._shape.prefixes[0]}.weight_scale", self._scales)
        self._packed = pack_int8(self._weight, self._scales[:, 0].contiguous())
        self._weight = self._scales = torch.empty(0)
