"""AWQ (arXiv:2306.00978): columns that meet large inputs are made larger before they are rounded, and so lose
less; what makes these inputs is divided by as much, so that nothing else changes.

How much is searched: scales are mean(|x|)^a, for the a with the least error of the outputs on the calibration
text. The loss comes from the second moments of the inputs, so no text has to be read again for any of the
candidates. The scaled columns are then rounded as GPTQ does it, which AWQ leaves open.
"""

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.block import Block
from quire_server.quantize.folding import Fold
from quire_server.quantize.grid import Grid, in_groups
from quire_server.quantize.watched import Watched

_STEPS = 20
_TINY = 1e-4


def quantise(block: Block) -> dict[Watched, Rounded]:
    """Scale, then round."""
    moments = block.fold(lambda fold, second: _best_scales(block, fold, second))
    return {linear: in_groups(block, linear.weight, moments[linear]) for linear in block.linears}


def _best_scales(block: Block, fold: Fold, moments: Tensor) -> Tensor:
    weight = fold.matrix.weight
    sizes = fold.maker.reduce(fold.matrix.inputs.sizes).clamp(min=_TINY)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS):
        scales = sizes ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        columns = fold.maker.spread(scales)
        groups = (weight * columns).unflatten(1, (-1, block.group_size))
        rounded = Grid.around(groups, block.stored).nearest(groups).flatten(1) / columns
        error = rounded - weight
        lost = float(((error @ moments) * error).sum())
        if lost < least:
            best, least = scales, lost
    return best
