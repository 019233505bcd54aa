"""GPTQ (arXiv:2210.17323): rounds a matrix column by column and compensates each column's error in the
columns that follow, as far as the inputs are correlated. Four bits, with a scale and a zero per group of
columns.

The other algorithms use the same compensation and the same 4-bit grid. Columns keep their order: sorting them
by activation (act-order) would scatter the groups, which slows down every kernel that reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear

_DAMPING = 0.01  # of the mean variance, so that inputs with little variance cause no large corrections


class Rounding(Protocol):
    """The values that the numbers of a row are rounded to."""

    def codes(self, values: Tensor) -> Tensor:
        """[out, n] -> f32 [out, n], as they are stored."""

    def nearest(self, values: Tensor) -> Tensor:
        """[out, n] -> f32 [out, n], the values that the codes represent."""


_R = TypeVar("_R", bound=Rounding)


def compensated(
    weight: Tensor, moments: Tensor, size: int, fit: Callable[[Tensor, Tensor], _R]
) -> tuple[Tensor, list[_R]]:
    """Codes f32 [out, in], and the rounding of each ``size`` columns. ``moments`` [in, in]: second moments of
    the inputs. ``fit(columns, importance)`` chooses the rounding of columns that already contain the errors
    of those before; ``importance`` weighs the squared error of each.
    """
    left, shares = weight.clone(), _shares(moments)
    codes, roundings = torch.empty_like(weight), list[_R]()
    for start in range(0, weight.shape[1], size):
        end = min(start + size, weight.shape[1])
        own = shares[start:end, start:end]
        columns = left[:, start:end]
        rounding = fit(columns, own.diagonal() ** -2)
        errors = torch.empty_like(columns)
        for index in range(end - start):
            column = columns[:, index : index + 1]
            codes[:, start + index] = rounding.codes(column)[:, 0]
            errors[:, index] = ((column - rounding.nearest(column)) / own[index, index])[:, 0]
            columns[:, index:] -= errors[:, index, None] * own[index, None, index:]
        left[:, end:] -= errors @ shares[start:end, end:]
        roundings.append(rounding)
    return codes, roundings


def _shares(moments: Tensor) -> Tensor:
    """f32 [in, in], upper triangular: row k has the corrections of columns from k on for an error of column
    k.
    """
    damped = moments.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


LARGEST = 15
# Candidate shares of a group's range: values outside are clipped, which makes the steps inside finer.
_SHARES = tuple(1 - step / 40 for step in range(17))


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zeros [..., 1] of numbers [..., n] in four bits."""

    scales: Tensor
    zeros: Tensor

    @classmethod
    def over(cls, low: Tensor, high: Tensor, stored: Callable[[Tensor], Tensor]) -> "Grid":
        """From low to high, on both sides of 0 or equal to it: 0 stays 0. ``stored`` rounds scales."""
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
        """Over the share of each group's range with the least loss; ``loss`` [..., n] -> [...] of the
        errors.
        """
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
        """The nearest whole numbers from 0 to 15."""
        return torch.round(values / self.scales + self.zeros).clamp(0, LARGEST)

    def nearest(self, values: Tensor) -> Tensor:
        """The values that the codes represent."""
        return (self.codes(values) - self.zeros) * self.scales


def in_groups(block: CalibratedLayer, weight: Tensor, moments: Tensor) -> Rounded:
    """Quantise [out, in]; each group's grid is fitted when its columns are reached."""

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


def quantise(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Quantise each matrix by the inputs that it had."""
    return {linear: in_groups(block, linear.weight, linear.inputs.second) for linear in block.linears}
