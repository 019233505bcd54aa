"""Rounding a matrix column after column: what each column loses is made good, as far as the inputs vary
together, by those that are still to come (GPTQ, arXiv:2210.17323).

Called by the algorithms. In the order of the columns: sorting them by activation (act-order) would tear
groups apart, which costs every kernel that reads them.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_DAMPING = 0.01  # of the mean variance: inputs that hardly vary must not move others far


class Rounding(Protocol):
    """What the numbers of a row may become."""

    def codes(self, values: Tensor) -> Tensor:
        """[out, n] -> f32 [out, n], as they are stored."""

    def nearest(self, values: Tensor) -> Tensor:
        """[out, n] -> f32 [out, n], what the codes stand for."""


_R = TypeVar("_R", bound=Rounding)


def compensated(
    weight: Tensor, moments: Tensor, size: int, fit: Callable[[Tensor, Tensor], _R]
) -> tuple[Tensor, list[_R]]:
    """Codes f32 [out, in], and the rounding of each ``size`` columns. ``moments`` [in, in] of the inputs;
    ``fit(columns, importance)`` is asked when the columns before have left their errors to these, and is told
    how much a squared error counts in each.
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
    """f32 [in, in], upper triangular: row k says how columns from k on make good an error of column k."""
    damped = moments.double()
    mean = damped.diagonal().mean()
    damped.diagonal().add_(_DAMPING * mean if mean > 0 else 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()
