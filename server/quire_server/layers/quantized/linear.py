"""Linear layers of quantised checkpoints: read as they are stored, dequantised once, computed as dense ones
(or, where int8 kernels are to compute int8, or a GPU has a kernel for them, not dequantised at all).

The reference path of every format: what is computed afterwards is what an unquantised model with these
weights would compute. ``factory`` is given to the models by ``runner.model_runner``, around the factory that
makes the dense layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.core.errors import ModelCorruptError
from quire_server.layers.gpu_linear import GpuLinear
from quire_server.layers.int8_linear import Int8Linear
from quire_server.layers.linear import LinearFactory, LinearLayer
from quire_server.layers.quantized.format import REMEDY, WeightFormat
from quire_server.layers.quantized.int8 import StoredInt8
from quire_server.layers.quantized.scaled import FP8, Scaled
from quire_server.layers.quantized.skipping import Skipped
from quire_server.layers.quantized.stored import Stored, can_multiply


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint's ``quantization_config`` says."""

    method: str  # in its own words
    weights: WeightFormat
    skipped: Skipped
    has_kv_scales: bool = False  # k_scale and v_scale of each attention layer are in the checkpoint

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are float8, however they are scaled."""
        return isinstance(self.weights, Scaled) and self.weights.dtype == FP8

    @property
    def is_w8a8(self) -> bool:
        """Whether int8 kernels can multiply the stored numbers as they are."""
        return isinstance(self.weights, Scaled) and self.weights.is_w8a8


class _Dequantized:
    """Holds the stored tensors until ``finish``, and the dense layer afterwards."""

    of_rounded = None

    def __init__(
        self,
        formats: Mapping[str, WeightFormat],
        sizes: Mapping[str, int],
        in_size: int,
        make_dense: "_DenseMaker",
    ) -> None:
        self._make_dense, self._formats = make_dense, formats
        device = make_dense.device
        self._stored = {
            f"{prefix}.{suffix}": torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for prefix, weights in formats.items()
            for suffix, spec in weights.tensors(prefix, in_size, sizes[prefix]).items()
        }
        plain = make_dense(
            torch.device("meta")
        ).targets()  # biases, and parts that the checkpoint keeps dense
        self._plain = {
            name: torch.empty_like(tensor, device=device)
            for name, tensor in plain.items()
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
        """Dequantise part by part, and let go of what was read."""
        layer = self._make_dense(self._make_dense.device)
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
        return (self._layer or self._make_dense(torch.device("meta"))).weights()

    def _dequantize(self, prefix: str) -> Tensor:
        names = [name for name in self._stored if name.rpartition(".")[0] == prefix]
        parts = {name: self._stored.pop(name) for name in names}
        for name, part in parts.items():
            if part.is_floating_point() and not bool(part.float().isfinite().all()):
                raise ModelCorruptError(f"{name} holds values that are not finite numbers. {REMEDY}")
        return self._formats[prefix].dequantize(
            prefix, {name.rpartition(".")[2]: part for name, part in parts.items()}
        )


@dataclass(frozen=True, slots=True)
class _DenseMaker:
    """The dense layer that takes a quantised one's place, on the device or, for its names, on none."""

    dense: LinearFactory
    prefixes: Sequence[str]
    in_size: int
    out_sizes: Sequence[int]
    bias: bool
    dtype: torch.dtype
    device: torch.device

    def __call__(self, device: torch.device) -> LinearLayer:
        return self.dense(
            self.prefixes, self.in_size, self.out_sizes, bias=self.bias, dtype=self.dtype, device=device
        )


def factory(quantization: Quantization, dense: LinearFactory) -> LinearFactory:
    """Layers that read what the checkpoint holds. What it skipped, and borrowed weights, are ``dense``; where
    that is int8, int8 matrices of the checkpoint are taken as they are; where it is a GPU's, what it has
    kernels for.
    """

    def make(
        prefixes: Sequence[str],
        in_size: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ) -> LinearLayer:
        formats = {
            prefix: quantization.weights for prefix in prefixes if not quantization.skipped.has(prefix)
        }
        if weight is not None or not formats:
            return dense(prefixes, in_size, out_sizes, bias=bias, dtype=dtype, device=device, weight=weight)
        if dense is Int8Linear and quantization.is_w8a8 and len(formats) == len(prefixes):
            return StoredInt8(prefixes, in_size, out_sizes, bias=bias, dtype=dtype, device=device)
        is_whole = len(formats) == len(prefixes)
        stored = quantization.weights
        if dense is GpuLinear and is_whole and can_multiply(stored, in_size, out_sizes, dtype):
            return Stored(stored, prefixes, in_size, out_sizes, bias=bias, dtype=dtype, device=device)
        maker = _DenseMaker(dense, prefixes, in_size, out_sizes, bias, dtype, device)
        return _Dequantized(formats, dict(zip(prefixes, out_sizes, strict=True)), in_size, maker)

    return make
