"""Linear layer with INT8 weights and dynamic per-token INT8 inputs on a GPU's tensor cores (W8A8).

The sums are integers, exact in any order: a row's result does not depend on the other rows of the batch. For
CPUs see `int8_linear`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.quantization.row_quantization import quantize_rows

if torch.cuda.is_available():
    from quire_kernels.quantization.w8a8_triton import quantize_rows_triton, scale_sums_triton

ALIGNED = 8  # `torch._int_mm` requires multiples of it for both sizes
_FEWEST, _FILLED = 17, 32  # rows that `_int_mm` needs on a GPU, and to how many fewer ones are padded


def w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x bf16 [T, K] -> [T, N]; ``weight`` int8 [N, K], ``scales`` f32 [N] of its rows, bias bf16 [N].

    An input row's scale is its largest magnitude over 127; a row with a NaN or an infinity gives NaN.
    """
    rows = len(x)
    if x.is_cuda:
        values, row_scales = quantize_rows_triton(x, rows if rows >= _FEWEST else _FILLED)
        sums = torch._int_mm(values, weight.T)[:rows]
        return scale_sums_triton(sums, row_scales, scales, bias, x.dtype)
    values, row_scales = quantize_rows(x, torch.int8)
    if rows < _FEWEST:
        values = functional.pad(values, (0, 0, 0, _FILLED - rows))
    sums = torch._int_mm(values, weight.T)[:rows]
    return _scaled(sums, row_scales, scales, bias, x.dtype)


def w8a8_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Summed in float64, which represents every sum exactly."""
    values, row_scales = quantize_rows(x, torch.int8)
    return _scaled(values.double() @ weight.double().T, row_scales, scales, bias, x.dtype)


def _scaled(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = sums.float() * row_scales[:, None] * scales
    return (y if bias is None else y + bias.float()).to(dtype)
