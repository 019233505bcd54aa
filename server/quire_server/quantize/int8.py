"""int8 weights with one scale per row, for kernels that also quantise activations to int8 (W8A8).

The weights alone lose almost nothing, but activations have outliers in a few channels. SmoothQuant
(arXiv:2211.10438, alpha 0.5) moves half of each channel's range, as a power, into the weights before they are
rounded. Errors are compensated column by column as in GPTQ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.calibrated_layer import COLUMNS, CalibratedLayer, Fold, ObservedLinear
from quire_server.quantize.gptq import compensated

_LARGEST = 127
_TINY = 1e-5


@dataclass(frozen=True, slots=True)
class _Rows:
    scales: Tensor  # [out, 1]

    def codes(self, values: Tensor) -> Tensor:
        return torch.round(values / self.scales).clamp(-_LARGEST, _LARGEST)

    def nearest(self, values: Tensor) -> Tensor:
        return self.codes(values) * self.scales


def quantise(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Smooth, then round."""
    moments = block.fold(_smoothing)
    return {linear: _rounded(block, linear.weight, moments[linear]) for linear in block.linears}


def _smoothing(fold: Fold, moments: Tensor) -> Tensor:
    """sqrt(largest input / largest weight of the column), normalised around 1."""
    inputs = fold.producer.reduce(fold.matrix.inputs.largest).clamp(min=_TINY)
    columns = fold.producer.reduce(fold.matrix.weight.abs().amax(0)).clamp(min=_TINY)
    scales = (inputs / columns).sqrt()
    return (scales / scales.log().mean().exp()).clamp(1e-2, 1e2)


def _rounded(block: CalibratedLayer, weight: Tensor, moments: Tensor) -> Rounded:
    rows = _Rows(block.stored(weight.abs().amax(dim=1, keepdim=True) / _LARGEST))
    codes, _ = compensated(weight, moments, COLUMNS, lambda columns, importance: rows)
    return Rounded(codes, rows.scales)
