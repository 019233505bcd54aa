"""Linear layers of quantised checkpoints: read in the stored format, dequantised once and computed dense; or
computed without dequantising where int8 kernels or a GPU's kernels support the format.

The dequantising path is the reference of every format: its results are those of an unquantised model with
these weights. ``factory`` wraps the factory that makes the dense layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_server.layers.int4_linear import ALIGNED, make_int4_linear
from quire_server.layers.int8_linear import Int8Linear
from quire_server.layers.linear import GpuLinear, Linear, LinearFactory, LinearLayer, LinearShape
from quire_server.layers.quantized.format import WeightFormat, empty_tensors, refuse_not_finite
from quire_server.layers.quantized.gpu_linear import QuantizedGpuLinear, can_multiply
from quire_server.layers.quantized.ignored_layers import IgnoredLayers
from quire_server.layers.quantized.int4 import StoredInt4, is_int4
from quire_server.layers.quantized.int8 import StoredInt8
from quire_server.layers.quantized.scaled_8bit import FP8, Scaled


@dataclass(frozen=True, slots=True)
class Quantization:
    """The content of a checkpoint's ``quantization_config``."""

    method: str  # as named in the file
    weights: WeightFormat
    ignored: IgnoredLayers
    has_kv_scales: bool = False  # the checkpoint has k_scale and v_scale for each attention layer

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are FP8, with any kind of scales."""
        return isinstance(self.weights, Scaled) and self.weights.dtype == FP8

    @property
    def is_w8a8(self) -> bool:
        """Whether int8 kernels can multiply the stored numbers without dequantising."""
        return isinstance(self.weights, Scaled) and self.weights.is_w8a8

    @property
    def is_int4(self) -> bool:
        """Whether int4 kernels can."""
        return is_int4(self.weights)


class Dequantized:
    """Holds the stored tensors until ``finish``, and a dense layer afterwards."""

    forward_fp8 = None

    def __init__(self, formats: Mapping[str, WeightFormat], dense: LinearFactory, shape: LinearShape) -> None:
        self._formats, self._dense, self._shape = formats, dense, shape
        self._stored = {
            f"{prefix}.{suffix}": tensor
            for prefix, weights in formats.items()
            for suffix, tensor in empty_tensors(prefix, weights, shape).items()
        }
        # Biases, and parts that the checkpoint keeps dense.
        self._plain = {
            name: torch.empty_like(tensor, device=shape.device)
            for name, tensor in self._skeleton().targets().items()
            if name.removesuffix(".weight") not in formats
        }
        self._layer: LinearLayer | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._layer is not None, "finish() comes first"
        return self._layer(x)

    def targets(self) -> dict[str, Tensor]:
        """The tensors in the checkpoint's own shapes and types."""
        return self._stored | self._plain

    def finish(self) -> None:
        """Dequantise part by part, freeing each part's stored tensors."""
        layer = self._dense(self._shape)
        for name, target in layer.targets().items():
            prefix = name.removesuffix(".weight")
            if prefix in self._formats:
                target.copy_(self._dequantize(prefix))
            else:
                target.copy_(self._plain.pop(name))
        layer.finish()
        self._layer = layer

    def weights(self) -> Sequence[Tensor]:
        """The dense layer's."""
        return (self._layer or self._skeleton()).weights()

    def _skeleton(self) -> LinearLayer:
        """The dense layer with its names only."""
        return self._dense(replace(self._shape, device=torch.device("meta")))

    def _dequantize(self, prefix: str) -> Tensor:
        names = [name for name in self._stored if name.rpartition(".")[0] == prefix]
        parts = {name: self._stored.pop(name) for name in names}
        for name, part in parts.items():
            refuse_not_finite(name, part)
        return self._formats[prefix].dequantize(
            prefix, {name.rpartition(".")[2]: part for name, part in parts.items()}
        )


def factory(quantization: Quantization, dense: LinearFactory) -> LinearFactory:
    """A factory of layers that read the checkpoint's format.

    Ignored layers and shared weights are made by ``dense``. If that is int8, int8 matrices of the checkpoint
    are not dequantised; if it is a GPU's, formats that the GPU has kernels for are not. If it is int4, 4-bit
    matrices are not, what the checkpoint keeps dense is int8, and nothing is rounded twice.
    """
    has_int4 = dense is make_int4_linear
    if has_int4:
        dense = Int8Linear

    def make(shape: LinearShape) -> LinearLayer:
        stored = quantization.weights
        formats = {prefix: stored for prefix in shape.prefixes if not quantization.ignored.has(prefix)}
        if shape.weight is not None or not formats:
            return dense(shape)
        if len(formats) == len(shape.prefixes):
            if dense is Int8Linear and quantization.is_w8a8:
                return StoredInt8(shape)
            if has_int4 and shape.in_size % ALIGNED[0] == 0:
                return StoredInt4(stored, shape)
            if dense is GpuLinear and can_multiply(stored, shape):
                return QuantizedGpuLinear(stored, shape)
        return Dequantized(formats, Linear if has_int4 else dense, shape)

    return make
