"""GPTQ (arXiv:2210.17323): rounds a matrix column by column and compensates each column's error in the
columns that follow, as far as the inputs are correlated. Four bits, with a scale and a zero per group of
columns.

Columns with large inputs come first, when most others can still compensate: groups by their largest input,
and the columns of a group by theirs. Sorting all columns (act-order) would scatter the groups, which slows
down every kernel that reads them. What was rounded is then improved by coordinate descent (QuantEase,
arXiv:2309.01885).

The other algorithms use the same compensation and the same 4-bit grid.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear

_DAMPING = 0.01  # of the mean variance, so that inputs with little variance cause no large corrections
_ROUNDS = 2  # of coordinate descent: a third wins little


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
    groups = _by_inputs(moments.diagonal(), size)
    order = torch.cat(groups)
    left, shares = weight[:, order], _shares(moments[order][:, order])
    codes, roundings = torch.empty_like(weight), dict[int, _R]()
    start = 0
    for group in groups:
        end = start + len(group)
        own = shares[start:end, start:end]
        columns = left[:, start:end]
        rounding = fit(columns, own.diagonal() ** -2)
        errors = torch.empty_like(columns)
        for index, place in enumerate(group.tolist()):
            column = columns[:, index : index + 1]
            codes[:, place] = rounding.codes(column)[:, 0]
            errors[:, index] = ((column - rounding.nearest(column)) / own[index, index])[:, 0]
            columns[:, index:] -= errors[:, index, None] * own[index, None, index:]
        left[:, end:] -= errors @ shares[start:end, end:]
        roundings[int(group.min())] = rounding
        start = end
    return codes, [roundings[first] for first in sorted(roundings)]


def _by_inputs(variances: Tensor, size: int) -> list[Tensor]:
    """The columns of each group of ``size``, in the order in which they are rounded."""
    groups = sorted(enumerate(variances.split(size)), key=lambda group: float(-group[1].max()))
    return [index * size + variances.argsort(descending=True) for index, variances in groups]


def _damped(moments: Tensor) -> Tensor:
    """f64 [in, in] with an inverse, without inputs too."""
    damped = moments.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    return damped


def _shares(moments: Tensor) -> Tensor:
    """f32 [in, in], upper triangular: row k has the corrections of columns from k on for an error of column
    k.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(_damped(moments)))
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
    _descend(codes, scales, zeros, weight, _damped(moments).float(), block)
    return Rounded(codes, scales, zeros)


def _descend(
    codes: Tensor, scales: Tensor, zeros: Tensor, weight: Tensor, moments: Tensor, block: CalibratedLayer
) -> None:
    """Change codes [out, in] and scales [out, groups] so that the outputs have smaller errors: in turns the
    scale of a group and each of its codes take the value that is best while all others stay.
    """
    size = block.group_size
    values = (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    slopes = (values - weight) @ moments  # half the derivative of the squared error by each value
    for group in list(range(scales.shape[1])) * _ROUNDS:
        columns = slice(group * size, (group + 1) * size)
        own, slope = moments[columns, columns], slopes[:, columns].clone()
        code, scale, zero = codes[:, columns], scales[:, group], zeros[:, group, None]
        steps = code - zero
        before = steps * scale[:, None]
        change = _change_of_scale(steps, slope, own, scale, block.stored)
        scale += change
        slope += (change[:, None] * steps) @ own
        for index in range(size):
            best = torch.round(code[:, index] - slope[:, index] / (own[index, index] * scale))
            change = best.clamp(0, LARGEST) - code[:, index]
            slope += (change * scale)[:, None] * own[index]
            code[:, index] += change
        slopes += ((code - zero) * scale[:, None] - before) @ moments[columns]


def _change_of_scale(
    steps: Tensor, slope: Tensor, moments: Tensor, scale: Tensor, stored: Callable[[Tensor], Tensor]
) -> Tensor:
    """[out]: by how much a group's scale changes for the least error; 0 where rounding it would lose more."""
    push, curve = (steps * slope).sum(1), ((steps @ moments) * steps).sum(1)
    change = stored(scale - push / curve.clamp(min=torch.finfo(torch.float32).tiny)) - scale
    return torch.where(change * (2 * push + change * curve) < 0, change, 0)


def _range(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)


def quantise(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Quantise each matrix by the inputs that it had."""
    return {linear: in_groups(block, linear.weight, linear.inputs.second) for linear in block.linears}
