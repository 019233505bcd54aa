"""int8 weights with a scale for each row, for kernels that round activations to int8 as well (W8A8).

The weights alone lose next to nothing. The activations have outliers in a few channels, so half of each
channel's excess (in powers) is moved into the weights before they are rounded: SmoothQuant, arXiv:2211.10438,
with its alpha of 0.5. Errors are then made good column after column, as GPTQ does it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.block import COLUMNS, Block
from quire_server.quantize.compensation import compensated
from quire_server.quantize.folding import Fold
from quire_server.quantize.watched import Watched

_LARGEST = 127
_TINY = 1e-5


@dataclass(frozen=True, slots=True)
class _Rows:
    scales: Tensor  # [out, 1]

    def codes(self, values: Tensor) -> Tensor:
        return torch.round(values / self.scales).clamp(-_LARGEST, _LARGEST)

    def nearest(self, values: Tensor) -> Tensor:
        return self.codes(values) * self.scales


def quantise(block: Block) -> dict[Watched, Rounded]:
    """Smooth, then round."""
    moments = block.fold(_smoothing)
    return {linear: _rounded(block, linear.weight, moments[linear]) for linear in block.linears}


def _smoothing(fold: Fold, moments: Tensor) -> Tensor:
    """sqrt(peak of the input / peak of the column), around 1."""
    inputs = fold.maker.reduce(fold.matrix.inputs.largest).clamp(min=_TINY)
    columns = fold.maker.reduce(fold.matrix.weight.abs().amax(0)).clamp(min=_TINY)
    scales = (inputs / columns).sqrt()
    return (scales / scales.log().mean().exp()).clamp(1e-2, 1e2)


def _rounded(block: Block, weight: Tensor, moments: Tensor) -> Rounded:
    rows = _Rows(block.stored(weight.abs().amax(dim=1, keepdim=True) / _LARGEST))
    codes, _ = compensated(weight, moments, COLUMNS, lambda columns, importance: rows)
    return Rounded(codes, rows.scales)
