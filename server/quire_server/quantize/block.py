"""One layer as the algorithms see it. Made by ``run``."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_server.quantize.folding import Fold
from quire_server.quantize.watched import Watched

COLUMNS = 128  # that are worked on at once, where nothing says how many belong together


@dataclass(frozen=True, slots=True)
class Block:
    """``scale_dtype``: scales are stored in it, so they are rounded to it before anything is measured in
    them.
    """

    linears: tuple[Watched, ...]  # to be quantised; each has seen its inputs
    folds: tuple[Fold, ...]
    scale_dtype: torch.dtype
    group_size: int  # columns that share a scale, where rows do not

    def stored(self, scales: Tensor) -> Tensor:
        """f32, as they will be read, and never 0."""
        rounded = scales.to(self.scale_dtype).float()
        return torch.where(rounded > 0, rounded, 1.0)

    def fold(self, choose: Callable[[Fold, Tensor], Tensor]) -> dict[Watched, Tensor]:
        """Scale all inputs that can be, by what ``choose`` says to a fold and its inputs' second
        moments. Returns the second moments that all matrices have afterwards.
        """
        moments = {linear: linear.inputs.second for linear in self.linears}
        for fold in self.folds:
            divided = fold.apply(choose(fold, moments[fold.matrix]))
            moments[fold.matrix] /= divided * divided[:, None]
        return moments
