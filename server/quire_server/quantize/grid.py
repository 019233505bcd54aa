"""Four bits with a scale and a zero for each group of columns: where to put the sixteen numbers. Called by
``awq`` and ``gptq``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.block import Block
from quire_server.quantize.compensation import compensated

LARGEST = 15
# How much of a group's range is kept: what lies outside is cut off, for finer steps inside.
_SHARES = tuple(1 - step / 40 for step in range(17))


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zeros [..., 1] of numbers [..., n]."""

    scales: Tensor
    zeros: Tensor

    @classmethod
    def over(cls, low: Tensor, high: Tensor, stored: Callable[[Tensor], Tensor]) -> "Grid":
        """From low to high, which are on both sides of 0 or at it: 0 stays 0. ``stored`` rounds scales."""
        scales = stored((high - low) / LARGEST)
        return cls(scales, torch.round(-low / scales).clamp(0, LARGEST))

    @classmethod
    def around(cls, values: Tensor, stored: Callable[[Tensor], Tensor]) -> "Grid":
        """Over the whole range of each group."""
        return cls.over(*_range(values), stored)

    @classmethod
    def fitted(
        cls, values: Tensor, loss: Callable[[Tensor], Tensor], stored: Callable[[Tensor], Tensor]
    ) -> "Grid":
        """Over the share of each group's range that loses least; ``loss`` [..., n] -> [...] of the errors."""
        low, high = _range(values)
        best = cls.over(low, high, stored)
        least = loss(best.nearest(values) - values)
        for share in _SHARES[1:]:
            grid = cls.over(low * share, high * share, stored)
            lost = loss(grid.nearest(values) - values)
            is_better = (lost < least)[..., None]
            best = cls(
                torch.where(is_better, grid.scales, best.scales),
                torch.where(is_better, grid.zeros, best.zeros),
            )
            least = torch.minimum(lost, least)
        return best

    def codes(self, values: Tensor) -> Tensor:
        """The nearest of the whole numbers from 0 to 15."""
        return torch.round(values / self.scales + self.zeros).clamp(0, LARGEST)

    def nearest(self, values: Tensor) -> Tensor:
        """What they stand for."""
        return (self.codes(values) - self.zeros) * self.scales


def in_groups(block: Block, weight: Tensor, moments: Tensor) -> Rounded:
    """[out, in], each group fitted and rounded when its turn comes."""

    def fit(columns: Tensor, importance: Tensor) -> Grid:
        return Grid.fitted(columns, lambda errors: errors.square() @ importance, block.stored)

    codes, grids = compensated(weight, moments, block.group_size, fit)
    scales, zeros = (
        torch.cat([grid.scales for grid in grids], 1),
        torch.cat([grid.zeros for grid in grids], 1),
    )
    return Rounded(codes, scales, zeros)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
