"""FP8 (e4m3) with one scale per row, for kernels that also quantise activations to FP8.

e4m3 has eight steps per power of two, coarse enough to matter for a small model, so errors are compensated
column by column as in GPTQ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.calibrated_layer import COLUMNS, CalibratedLayer, ObservedLinear
from quire_server.quantize.gptq import compensated

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max


@dataclass(frozen=True, slots=True)
class _Rows:
    scales: Tensor  # [out, 1]

    def codes(self, values: Tensor) -> Tensor:
        return (values / self.scales).clamp(-_LARGEST, _LARGEST).to(_DTYPE).float()

    def nearest(self, values: Tensor) -> Tensor:
        return self.codes(values) * self.scales


def quantise(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Quantise each matrix by the inputs that it had."""
    return {linear: _rounded(block, linear) for linear in block.linears}


def _rounded(block: CalibratedLayer, linear: ObservedLinear) -> Rounded:
    rows = _Rows(block.stored(linear.weight.abs().amax(dim=1, keepdim=True) / _LARGEST))
    codes, _ = compensated(linear.weight, linear.inputs.second, COLUMNS, lambda columns, importance: rows)
    return Rounded(codes, rows.scales)
