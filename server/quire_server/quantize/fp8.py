"""FP8 (e4m3) with a scale for each row, by its largest number, for kernels that round activations to FP8 as
well.

Eight steps to each power of two are coarse enough that a small model notices: errors are made good column
after column, as GPTQ does it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.block import COLUMNS, Block
from quire_server.quantize.compensation import compensated
from quire_server.quantize.watched import Watched

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max


@dataclass(frozen=True, slots=True)
class _Rows:
    scales: Tensor  # [out, 1]

    def codes(self, values: Tensor) -> Tensor:
        return (values / self.scales).clamp(-_LARGEST, _LARGEST).to(_DTYPE).float()

    def nearest(self, values: Tensor) -> Tensor:
        return self.codes(values) * self.scales


def quantise(block: Block) -> dict[Watched, Rounded]:
    """Each matrix by the inputs that it had."""
    return {linear: _rounded(block, linear) for linear in block.linears}


def _rounded(block: Block, linear: Watched) -> Rounded:
    rows = _Rows(block.stored(linear.weight.abs().amax(dim=1, keepdim=True) / _LARGEST))
    codes, _ = compensated(linear.weight, linear.inputs.second, COLUMNS, lambda columns, importance: rows)
    return Rounded(codes, rows.scales)
