"""AWQ (arXiv:2306.00978): columns with large inputs are scaled up before rounding, and so lose less; the
producer of these inputs is divided by the same scales, so the model is unchanged.

The scales are mean(|x|)^a, for the a with the least output error on the calibration text. The error is
computed from the second moments of the inputs, so the text is not read again for each candidate. AWQ leaves
the rounding itself open; this uses GPTQ's.
"""

import torch
from torch import Tensor

from quire_server.layers.quantized.format import Rounded
from quire_server.quantize.calibrated_layer import CalibratedLayer, Fold, ObservedLinear
from quire_server.quantize.gptq import Grid, in_groups

_STEPS = 20
_TINY = 1e-4


def quantise(block: CalibratedLayer) -> dict[ObservedLinear, Rounded]:
    """Scale, then round."""
    moments = block.fold(lambda fold, second: _best_scales(block, fold, second))
    return {linear: in_groups(block, linear.weight, moments[linear]) for linear in block.linears}


def _best_scales(block: CalibratedLayer, fold: Fold, moments: Tensor) -> Tensor:
    weight = fold.matrix.weight
    sizes = fold.producer.reduce(fold.matrix.inputs.sizes).clamp(min=_TINY)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS):
        scales = sizes ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        columns = fold.producer.spread(scales)
        groups = (weight * columns).unflatten(1, (-1, block.group_size))
        rounded = Grid.around(groups, block.stored).nearest(groups).flatten(1) / columns
        error = rounded - weight
        lost = float(((error @ moments) * error).sum())
        if lost < least:
            best, least = scales, lost
    return best
