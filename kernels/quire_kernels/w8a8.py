"""A linear layer of int8 weights, whose inputs are rounded to int8 on the way, each row by itself, on a GPU's
tensor cores. Called by the linear layers of such checkpoints (a CPU's are `int8_linear`).

The sums are whole numbers, exact in any order: a row's result does not depend on who else is there.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.kv_quantization import quantize_kv

ALIGNED = 8  # inputs and outputs must be a multiple of it: `torch._int_mm`
_FEWEST, _FILLED = 17, 32  # rows that it takes on a GPU, and how many are made of fewer


def w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bf16 [T, K] -> [T, N]; ``weight`` int8 [N, K], ``scales`` f32 [N] of its rows, bias bf16 [N].

    An input row's scale is its largest element over 127. What is not finite makes its row not a number.
    """
    values, row_scales = quantize_kv(x, torch.int8)
    rows = len(values)
    if rows < _FEWEST:
        values = functional.pad(values, (0, 0, 0, _FILLED - rows))
    sums = torch._int_mm(values, weight.T)[:rows]
    return _scaled(sums, row_scales, scales, bias, x.dtype)


def w8a8_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Summed in float64, which holds every sum."""
    values, row_scales = quantize_kv(x, torch.int8)
    return _scaled(values.double() @ weight.double().T, row_scales, scales, bias, x.dtype)


def _scaled(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = sums.float() * row_scales[:, None] * scales
    return (y if bias is None else y + bias.float()).to(dtype)
