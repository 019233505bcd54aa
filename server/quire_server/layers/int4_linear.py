"""Linear layers that are loaded dense and rounded to int4, for CPUs (a ``LinearFactory``, see
``runner.quantization``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels import Int4Weight, int4_linear, quantise_int4
from quire_server.layers.int8_linear import Int8Linear
from quire_server.layers.linear import Linear, LinearLayer, LinearShape

#: What the kernel computes at once: inputs, outputs.
ALIGNED = (32, 16)
#: Last parts of the names of what stays int8: the head, routers, values and what is multiplied with them.
_KEPT = frozenset({"lm_head", "gate", "v_proj", "qkv_proj"})


class Int4Linear(Linear):
    """y = x W^T + b. W has one scale for each 32 numbers of a row; x is quantised to int8 on the fly, with as
    many.
    """

    _quantised: Int4Weight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self._quantised is not None, "finish() comes before the first call"
        return int4_linear(x, self._quantised, self.bias)

    def finish(self) -> None:
        """Quantise, and free the dense matrix."""
        self._quantised = quantise_int4(self.weight)
        self.weight = torch.empty(0)
        self.bias = None if self.bias is None else self.bias.float()

    def weights(self) -> Sequence[Tensor]:
        """The packed tensors, once they exist."""
        if self._quantised is None:
            return super().weights()
        bias = () if self.bias is None else (self.bias,)
        return (*self._quantised.tensors, *bias)


def make_int4_linear(shape: LinearShape) -> LinearLayer:
    """A LinearFactory. The head, routers and the projection to queries, keys and values are int8, which lose
    most by four bits, and matrices whose sizes are no multiples of what the kernel computes at once.
    """
    inputs, outputs = ALIGNED
    is_aligned = shape.in_size % inputs == 0 and sum(shape.out_sizes) % outputs == 0
    is_kept = any(prefix.rpartition(".")[2] in _KEPT for prefix in shape.prefixes)
    return Int4Linear(shape) if is_aligned and not is_kept else Int8Linear(shape)
