"""`silu_mul` whose result is quantised to float8 before it leaves the registers. Called once per layer by the
activation layer where the down projection has float8 weights.
"""

import torch
from torch import Tensor

from quire_kernels.fp8_quantize import Quantized, fp8_quantize_reference
from quire_kernels.silu_mul import silu_mul_reference

if torch.cuda.is_available():
    from quire_kernels.silu_mul_fp8_triton import silu_mul_fp8_triton


def silu_mul_fp8(gate_up: Tensor, *, out: Quantized | None = None) -> Quantized:
    """``fp8_quantize`` of ``silu_mul``, which is rounded to its dtype in between: [tokens, 2 * intermediate]
    -> (e4m3 [tokens, intermediate], scales f32 [tokens, 1]).
    """
    if gate_up.is_cuda:
        return silu_mul_fp8_triton(gate_up, out=out)
    return silu_mul_fp8_reference(gate_up, out=out)


def silu_mul_fp8_reference(gate_up: Tensor, *, out: Quantized | None = None) -> Quantized:
    """One after the other."""
    return fp8_quantize_reference(silu_mul_reference(gate_up), out=out)
